"""Turn mistakes that pydantic finds into messages with a fix."""

import json
import math
import re
from collections.abc import Mapping, Sequence

import tomli_w
from pydantic_core import ErrorDetails

from meshwright.config.fields import find_section
from meshwright.config.suggest import nearest, suggest_key, suggest_section
from meshwright.errors import ConfigError, UnknownKeyError, config_error

THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+")
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
SAME_VALUES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full_precision": "float32",
    "cosine_with_warmup": "cosine",
    "cos": "cosine",
    "1f1b": "1F1B",
    "async": "thread",
    "true": "full",
}
"""Words of other frameworks for a choice, and ours; it counts only where ours is a choice."""
INSTEAD = {
    ("lr_scheduler.decay_type", word): "leave it out, and set lr_scheduler.decay_ratio = 0"
    for word in ("constant", "constant_with_warmup", "none")
}
"""By key and value: the way to a meaning that has no choice of that key."""
RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "finite_number": "must be a finite number",
    "missing": "must be given",
    "too_short": "must not be empty",
}


def explain_mistake(mistake: ErrorDetails) -> ConfigError:
    """Return one of pydantic's complaints as `key = value: rule`, with the fix if it is known."""
    location = [str(part) for part in mistake["loc"]]
    key, kind, value = ".".join(location), mistake["type"], mistake["input"]
    if kind == "extra_forbidden":
        if len(location) == 1 and isinstance(value, Mapping):
            return UnknownKeyError(
                key, f"unknown section {key}\n  fix: {suggest_section(key, value)}"
            )
        return UnknownKeyError(key, f"unknown key {key}\n  fix: {suggest_key(location)}")
    if kind == "missing":
        return ConfigError(key, f"{key}: {RULES[kind]}")
    return explain_value(key, mistake)


def explain_value(key: str, mistake: ErrorDetails) -> ConfigError:
    """Return the error of a value that breaks one of pydantic's rules."""
    kind, value = mistake["type"], mistake["input"]
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    rule = RULES.get(kind) or message[0].lower() + message[1:]
    fix = INSTEAD.get((key, str(value).lower())) or _right_spelling(
        kind, value, mistake.get("ctx", {})
    )
    if kind == "list_type" and isinstance(value, Mapping) and find_section(tuple(key.split("."))):
        fix = f"write [[{key}]], in two brackets"
    return config_error(key, value, rule, fix)


def _right_spelling(kind: str, value: object, context: Mapping[str, object]) -> str:
    """Return how the value has to be written; "" if that cannot be known."""
    match kind:
        case "int_type" | "int_from_float" | "float_type":
            return _as_number(value, whole=kind != "float_type")
        case "bool_type" | "bool_or_auto":
            word = str(value).lower()
            known = {**dict.fromkeys(YES, "true"), **dict.fromkeys(NO, "false")}
            return f"write {known[word]}, without quotes" if word in known else ""
        case "string_type" if isinstance(value, bool | int | float):
            return f'quote it: "{_toml(value)}"'
        case "list_type" if isinstance(value, str) and value.startswith("["):
            parts = [part.strip(" \"'") for part in value.strip("[]").split(",")]
            return f"quote it for the shell: '{json.dumps(parts)}'"
        case "list_type" if isinstance(value, str | int | float):
            return f"write [{_toml(value)}]"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            word = SAME_VALUES.get(str(value).lower(), str(value))
            found = word if word in choices else nearest(word, choices, may_lack_digits=True)
            return f'write "{found}"' if found else ""
    return ""


def _as_number(value: object, whole: bool) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], int | float):
        return f"write {value[0]}"
    text = str(value).strip()
    if THOUSANDS.fullmatch(text):  # of the command line, where text has no quotes
        return f"write {text.replace(',', '')}"
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return ""
    if isinstance(value, bool) or not math.isfinite(number):
        return ""
    if number.is_integer() and whole:
        is_quoted = value == str(int(number))  # other text may come from the command line
        return f"write {int(number)}" + (", without quotes" if is_quoted else "")
    if not whole:
        return f"write {text}, without quotes"
    return f"the nearest is {round(number)}"


def _toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).partition("= ")[2].strip()


def explain_sections(names: Sequence[str]) -> str:
    """Return the fault of a TOML, if none of its sections is ours or near to one of ours."""
    advice = [suggest_section(name, []) for name in names]
    if len(names) < 2 or any("did you mean" in text for text in advice):
        return ""
    sections = advice[0].removeprefix("leave it out; ")
    return f"has no section of ours, only {', '.join(names)}\n  fix: {sections}"
