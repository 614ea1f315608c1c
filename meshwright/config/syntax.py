"""Turn a file that is not TOML into a message with the line, a caret and the right spelling."""

import re
import unicodedata
from collections.abc import Sequence

import tomli

from meshwright.config.explain import NO, THOUSANDS, YES
from meshwright.config.fields import all_keys
from meshwright.config.job_config import JobConfig
from meshwright.config.provenance import ASSIGNMENT, HEADER, underline
from meshwright.errors import ConfigError

UNQUOTED = re.compile(r"^(?P<key>\s*[\w.\"'-]+\s*=\s*)(?P<value>[^#\n]*?)\s*(#.*)?$")
DOUBLE, SINGLE = "\u201c\u201d\u201e\u201f\u00ab\u00bb", "\u2018\u2019\u201a\u201b"
STRAIGHT = str.maketrans(DOUBLE + SINGLE, '"' * len(DOUBLE) + "'" * len(SINGLE))
"""Quotes of word processors and web pages, and ours."""
CONFLICT = ("<<<<<<<", "=======", ">>>>>>>")


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
    """Return the error of a file that is not UTF-8: the line, and the way to mend it."""
    if error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        place, found = path, "it is UTF-16"
    else:
        place = f"{path}:{error.object.count(10, 0, error.start) + 1}"
        found = f"it has byte 0x{error.object[error.start]:02x}"
    return ConfigError("", f"{place}: cannot be read as UTF-8: {found}\n  fix: save it as UTF-8")


def _right_line(line: str) -> str:
    """Return how the line has to be written; "" if that cannot be known."""
    stripped = line.strip(" \t\r")  # other spaces are wrong
    if stripped.startswith(("//", "--", ";", "/*")):
        return "a comment begins with #"
    if stripped.startswith(CONFLICT):
        return "a merge left this line: keep one of the two sides"
    if stripped.startswith("{"):
        return "this is JSON; TOML has [section], and below it key = value"
    plain = unicodedata.normalize("NFKC", stripped).translate(STRAIGHT).strip()
    if plain != stripped and _is_toml(plain):
        return f"write it in plain characters: {plain}"
    if stripped.startswith("["):
        table = f"[{stripped.strip('[] :;,')}]"
        return f"write {table}" if table != stripped and _is_toml(table) else ""
    key, separator, rest = re.fullmatch(r"([^\s:=]*)([\s:=]*)(.*)", stripped).groups()  # type: ignore[union-attr]
    if not key.isascii():
        strange = next(character for character in key if not character.isascii())
        name = unicodedata.name(strange, "unknown character").lower()
        return f"write the key in plain letters: {strange!r} is {name}"
    if separator.strip() != "=":  # of YAML, of Python, of a command line
        if not _is_known(key):
            return ""
        is_table = key in JobConfig.model_fields and (not rest or rest.startswith("#"))
        return f"write [{key}]" if is_table else f"write {key} = {rest}"
    if stripped[-1] in ",;" and _is_toml(stripped[:-1]):
        return f"write {stripped[:-1].rstrip()}"
    found = UNQUOTED.match(line)
    return _right_value(found["value"].strip()) if found else ""


def _is_known(key: str) -> bool:
    """Return whether a key, with or without its section, or a section, has this name."""
    names = {found[-1] for found, _ in all_keys()}
    return key.rpartition(".")[2] in names or key in JobConfig.model_fields


def _right_value(value: str) -> str:
    """Return how the value has to be written; "" if that cannot be known."""
    if value.lower() in ("none", "null", "nil", "~", ""):
        return "leave the key out: it then has its default"
    if value.lower() in (*YES, *NO):
        return f"write {'true' if value.lower() in YES else 'false'}"
    if "$" in value:
        return "TOML has no variables: write the value, or give the key on the command line"
    if number := _right_number(value):
        return f"write {number}"
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


def _right_number(value: str) -> str:
    """Return the number that `value` means, as TOML writes it; "" if it is none."""
    if thousands := re.fullmatch(r"([\d_]+(?:\.\d+)?)([kKmM])", value):
        return str(round(float(thousands[1]) * (10**3 if thousands[2] in "kK" else 10**6)))
    if THOUSANDS.fullmatch(value):
        return value.replace(",", "_")
    if re.fullmatch(r"[+-]?\d+,\d+([eE][+-]?\d+)?", value):
        return value.replace(",", ".")
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value):
        return f"{float(percent[1]) / 100:g}"
    if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", value):  # 1. and .5
        return re.sub(r"\.(?!\d)", ".0", re.sub(r"(?<!\d)\.", "0.", value))
    if product := re.fullmatch(r"(\d{1,9})\s*(\*|\*\*|\^)\s*(\d{1,9})", value):
        a, b = int(product[1]), int(product[3])
        is_power = product[2] != "*"
        return str(a**b if is_power else a * b) if not is_power or b < 64 else ""
    if with_unit := re.fullmatch(r"(\d[\d_]*)\s+[A-Za-z]+", value):
        return with_unit[1]
    return ""


def _is_toml(line: str) -> bool:
    try:
        tomli.loads(line)
    except tomli.TOMLDecodeError:
        return False
    return True
