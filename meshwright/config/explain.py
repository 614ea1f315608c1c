"""Turn mistakes that pydantic and tomli find into messages with a fix."""

import math
import re
from collections.abc import Mapping

import tomli
import tomli_w
from pydantic_core import ErrorDetails

from meshwright.config.provenance import underline
from meshwright.config.suggest import nearest, suggest_key, suggest_section
from meshwright.errors import ConfigError, UnknownKeyError, config_error

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
SAME_VALUES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full_precision": "float32",
    "cosine_with_warmup": "cosine",
    "cos": "cosine",
    "constant": "linear",
    "1f1b": "1F1B",
    "async": "thread",
    "true": "full",
}
"""Words of other frameworks for a choice, and ours; it counts only where ours is a choice."""
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
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    rule = RULES.get(kind) or message[0].lower() + message[1:]
    if kind == "missing":
        return ConfigError(key, f"{key}: {rule}")
    fix = _right_spelling(kind, value, mistake.get("ctx", {}))
    return config_error(key, value, rule, fix)


def _right_spelling(kind: str, value: object, context: Mapping[str, object]) -> str:
    """Return how the value has to be written; "" if that cannot be known."""
    match kind:
        case "int_type" | "int_from_float" | "float_type":
            return _as_number(value, whole=kind != "float_type")
        case "bool_type":
            word = str(value).lower()
            known = {**dict.fromkeys(YES, "true"), **dict.fromkeys(NO, "false")}
            return f"write {known[word]}, without quotes" if word in known else ""
        case "string_type" if isinstance(value, bool | int | float):
            return f'quote it: "{_toml(value)}"'
        case "list_type" if isinstance(value, str | int | float):
            return f"write [{_toml(value)}]"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            word = SAME_VALUES.get(str(value).lower(), str(value))
            found = word if word in choices else nearest(word, choices, may_lack_digits=True)
            return f'write "{found}"' if found else ""
    return ""


def _as_number(value: object, whole: bool) -> str:
    try:
        number = float(str(value).strip().replace("_", ""))
    except ValueError:
        return ""
    if isinstance(value, bool) or not math.isfinite(number):
        return ""
    if number.is_integer() and whole:
        return f"write {int(number)}" + (", without quotes" if isinstance(value, str) else "")
    if not whole:
        return f"write {str(value).strip()}, without quotes"
    return f"the nearest is {round(number)}"


def _toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).partition("= ")[2].strip()


UNQUOTED = re.compile(r"^(?P<key>\s*[\w.\"'-]+\s*=\s*)(?P<value>[^#\n]*?)\s*(#.*)?$")


def explain_syntax(error: tomli.TOMLDecodeError, path: str) -> ConfigError:
    """Return the error of a TOML that cannot be parsed: the line, a caret, the right spelling."""
    lines = error.doc.split("\n")
    number, column = min(error.lineno, len(lines)), error.colno - 1
    line = lines[number - 1]
    if not line.strip() and number > 1:  # the end of the line, or of the file, came too early
        number, line = number - 1, lines[number - 2]
        column = len(line) - 1
    fix = _right_syntax(line)
    return ConfigError(
        "",
        "\n".join(
            [
                f"{path}:{number}: not TOML: {error.msg}",
                *underline(line, column, column + 1),
                *([f"  fix: {fix}"] if fix else []),
            ]
        ),
    )


def _right_syntax(line: str) -> str:
    stripped = line.strip()
    if stripped.startswith(("//", "--", ";", "/*")):
        return "a comment begins with #"
    if stripped.startswith("[") and not stripped.rstrip("]").endswith("]"):
        return f"write [{stripped.strip('[] ')}]"
    if colon := re.fullmatch(r"([\w.-]+)\s*:\s*(.+)", stripped):
        return f"write {colon[1]} = {colon[2]}"
    if not (found := UNQUOTED.match(line)):
        words = stripped.split(maxsplit=1)
        return f"write {words[0]} = {words[1]}" if len(words) == 2 else ""
    value = found["value"].strip()
    if value.lower() in ("none", "null", "nil", "~", ""):
        return "leave the key out: it then has its default"
    if value.lower() in (*YES, *NO):
        return f"write {'true' if value.lower() in YES else 'false'}"
    if thousands := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value):
        factor = 10**3 if thousands[2] in "kK" else 10**6
        return f"write {round(float(thousands[1]) * factor)}"
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        return f"write {value.replace(',', '_')}"
    if value[0] in "\"'" and not value.endswith(value[0]):
        return f"close the quote: {value}{value[0]}"
    if value[0] == "[" and value.count("[") > value.count("]"):
        return "close the list: ]"
    if re.fullmatch(r"[A-Za-z/~.][^\"']*", value):
        return f'quote it: "{value}"'
    return ""
