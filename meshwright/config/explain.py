"""Turns the mistakes that pydantic and the TOML parser find into messages with a fix."""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

import tomli
import tomli_w
from pydantic_core import ErrorDetails

from meshwright.config.fields import all_keys, find_section
from meshwright.config.job_config import JobConfig
from meshwright.config.provenance import ASSIGNMENT, HEADER, underline
from meshwright.config.suggest import nearest, suggest_key, suggest_section
from meshwright.system.errors import ConfigError, UnknownKeyError, config_error

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
            near = nearest(word, choices, may_lack_digits=True)
            return f'write "{near[0]}"' if near else ""
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


UNQUOTED = re.compile(r"^(?P<key>\s*[\w.\"'-]+\s*=\s*)(?P<value>[^#\n]*?)\s*(#.*)?$")

DOUBLE, SINGLE = "\u201c\u201d\u201e\u201f\u00ab\u00bb", "\u2018\u2019\u201a\u201b"

STRAIGHT = str.maketrans(DOUBLE + SINGLE, '"' * len(DOUBLE) + "'" * len(SINGLE))
"""Quotes of word processors and web pages, and ours."""


def explain_syntax(error: tomli.TOMLDecodeError, path: str) -> ConfigError:
    """Return the error of a TOML that cannot be parsed: the line, a caret, the right spelling."""
    lines = error.doc.split("\n")
    number, column = min(error.lineno, len(lines)), error.colno - 1
    line = lines[number - 1]
    if not line.strip() and number > 1:  # the end of the line, or of the file, came too early
        number, line = number - 1, lines[number - 2]
        column = len(line) - 1
    message, fix = error.msg, _right_line(line)
    if first := _line_that_wrote_it_first(lines[:number]):
        is_table = bool(HEADER.match(line) and HEADER.match(lines[first - 1]))
        message = f"{'the table' if is_table else 'the key'} is in line {first}, too"
        fix = f"move its keys to line {first}" if is_table else "leave out one of the two"
        column = len(line) - len(line.lstrip())
    return ConfigError(
        "",
        "\n".join(
            [
                f"{path}:{number}: not TOML: {message}",
                *underline(line, column, column + 1),
                *([f"  fix: {fix}"] if fix else []),
            ]
        ),
    )


def _line_that_wrote_it_first(lines: Sequence[str]) -> int:
    """Return the number of the line that has the key, or the table, of the last line; 0 if none."""
    table, wrote = "", dict[str, int]()
    first = 0
    for number, line in enumerate(lines, 1):
        if header := HEADER.match(line):
            if header["brackets"] == "[[":  # one more table of a list
                wrote = {name: n for name, n in wrote.items() if not name.startswith(header["key"])}
            table = name = header["key"]
            is_again = header["brackets"] == "["
        elif assignment := ASSIGNMENT.match(line):
            name, is_again = f"{table}.{assignment['key']}", True
        else:
            name, is_again = "", False
        first = wrote.setdefault(name, number) if is_again else number
    return first if first < len(lines) else 0


def explain_encoding(error: UnicodeDecodeError, path: str) -> ConfigError:
    """Return the error of a file that is not UTF-8: the line, and the way to correct it."""
    place = f"{path}:{error.object.count(10, 0, error.start) + 1}"
    found = f"it has byte 0x{error.object[error.start]:02x}"
    return ConfigError("", f"{place}: cannot be read as UTF-8: {found}\n  fix: save it as UTF-8")


def _right_line(line: str) -> str:
    """Return how the line has to be written; "" if that cannot be known."""
    stripped = line.strip(" \t\r")  # other spaces are wrong
    if stripped.startswith(("//", "--", ";", "/*")):
        return "a comment begins with #"
    plain = unicodedata.normalize("NFKC", stripped).translate(STRAIGHT).strip()
    if plain != stripped and _is_toml(plain):
        return f"write it in plain characters: {plain}"
    if stripped[-1:] in (",", ";") and _is_toml(stripped[:-1]):
        return f"write {stripped[:-1].rstrip()}"
    if yaml := re.fullmatch(r"(?P<key>[\w.]+)(:\s*|\s*==\s*)(?P<value>[^:].*)?", stripped):
        key, value = yaml["key"], yaml["value"]
        if key.rpartition(".")[2] in {found[-1] for found, _ in all_keys()} and value:
            return f"write {key} = {value}"
        return f"write [{key}]" if key in JobConfig.model_fields and not value else ""
    found = UNQUOTED.match(line)
    return _right_value(found["value"].strip()) if found else ""


def _right_value(value: str) -> str:
    """Return how the value has to be written; "" if that cannot be known."""
    if value.lower() in ("none", "null", "nil", "~", ""):
        return "leave the key out: it then has its default"
    if value.lower() in (*YES, *NO):
        return f"write {'true' if value.lower() in YES else 'false'}"
    if thousands := re.fullmatch(r"(\d[\d_]*)k", value.lower()):
        return f"write {thousands[1]}000"
    if THOUSANDS.fullmatch(value):
        return f"write {value.replace(',', '_')}"
    if re.fullmatch(r"[+-]?\d+,\d+", value):
        return f"write {value.replace(',', '.')}"
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", value):  # 1. and .5
        return f"write {float(value)!r}"
    if re.fullmatch(r'"[^"\']*\\[^"\']*"', value):
        return f"write it in single quotes, which leave \\ alone: '{value[1:-1]}'"
    if value[0] in "\"'" and not value.endswith(value[0]):
        quote = value[:3] if value.startswith(value[0] * 3) else value[0]
        return f"close the quote: {value.rstrip(chr(34) + chr(39))}{quote}"
    if value[0] == "[" and value.count("[") > value.count("]"):
        return "close the list: ]"
    if re.fullmatch(r"[A-Za-z/~.][^\"']*", value):
        return f"quote it: '{value}'" if "\\" in value else f'quote it: "{value}"'
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomli.loads(line)
    except tomli.TOMLDecodeError:
        return False
    return True
