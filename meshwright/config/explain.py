"""Turns mistakes in keys, values and TOML into messages with a fix, or says nothing of a fix."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import tomli
import tomli_w
from pydantic_core import ErrorDetails

from meshwright.config.fields import Key, all_keys, find_section
from meshwright.config.job_config import JobConfig
from meshwright.config.provenance import underline
from meshwright.system.errors import ConfigError, UnknownKeyError, config_error

ALIKE = 0.74
"""Least share of equal letters of a typing error: "anme" and "name" have 0.75."""

ALIKE_SYNONYM = 0.88

THOUSANDS = r"[1-9]\d{0,2}(,\d{3})+"

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

INSTEAD = {
    ("lr_scheduler.decay_type", word): "leave it out, and set lr_scheduler.decay_ratio = 0"
    for word in ("constant", "constant_with_warmup", "none")
}
"""By key and value: the way to a meaning that has no choice of that key."""

RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "missing": "must be given",
    "too_short": "must not be empty",
}


def explain_mistake(mistake: ErrorDetails) -> Iterator[ConfigError]:
    """Yield one of pydantic's complaints as `key = value: rule`, with the fix if it is known; for
    a table of another framework's, one for each of its keys."""
    location = tuple(str(part) for part in mistake["loc"])
    key, kind, value = ".".join(location), mistake["type"], mistake["input"]
    if kind == "extra_forbidden":
        inside = [*_keys_inside(location, value)]
        if any(_bare(".".join(one)) in _known_elsewhere() for one in inside):
            yield from map(_unknown_key, inside)
        elif len(location) == 1 and isinstance(value, Mapping):
            fix = suggest_section(key, value)
            yield UnknownKeyError(key, f"unknown section {key}\n  fix: {fix}")
        else:
            yield _unknown_key(location)
    elif kind == "missing":
        yield ConfigError(key, f"{key}: {RULES[kind]}")
    else:
        yield explain_value(key, mistake)


def _unknown_key(key: Key) -> UnknownKeyError:
    name = ".".join(key)
    return UnknownKeyError(name, f"unknown key {name}\n  fix: {suggest_key(key)}")


def _keys_inside(key: Key, value: object) -> Iterator[Key]:
    """Yield the keys of a table and of the tables in it."""
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _keys_inside((*key, name), inner)
        if not isinstance(inner, Mapping):
            yield (*key, name)


def explain_value(key: str, mistake: ErrorDetails) -> ConfigError:
    """Return the error of a value that breaks one of pydantic's rules."""
    kind, value = mistake["type"], mistake["input"]
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ")
    rule = RULES.get(kind) or message[0].lower() + message[1:]
    choices = re.findall(r"'([^']*)'", str(mistake.get("ctx", {}).get("expected", "")))
    fix = INSTEAD.get((key, str(value).lower())) or _right_spelling(kind, value, choices)
    if kind == "list_type" and find_section(tuple(key.split("."))):
        fix = f"write a table under [[{key}]], in two brackets"
    return config_error(key, value, rule, fix)


def _right_spelling(kind: str, value: object, choices: Sequence[str]) -> str:
    """Return how the value has to be written; "" if that can't be known."""
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
            word = read_synonyms()["values"].get(_bare(str(value)), str(value))
            near = nearest(word, choices, may_lack_digits=True)
            return f'write "{near[0]}"' if near else ""
    return ""


def _as_number(value: object, whole: bool) -> str:
    text = str(value).strip()
    if fix := _rewritten(text, NUMBERS):  # of the command line, where text has no quotes
        return fix
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    if number.is_integer() and whole:
        is_quoted = value == str(int(number))  # other text may come from the command line
        return f"write {int(number)}" + (", without quotes" if is_quoted else "")
    return f"the nearest is {round(number)}" if whole else f"write {text}, without quotes"


def _toml(value: object) -> str:
    return tomli_w.dumps({"value": value}).partition("= ")[2].strip()


NUMBERS = (
    (r"(\d[\d_]*)[kK]", r"write \g<1>000"),
    (r"([+-]?\d+),(\d+)", r"write \1.\2"),
    (r"([+-]?\d+)\.([eE].*)?", r"write \1.0\2"),
    (r"([+-]?)(\.\d.*)", r"write \g<1>0\2"),
)

SLIPS = (
    (r"(?i:none|null|nil|~|)", "leave the key out: it then has its default"),
    (rf"(?i:{'|'.join(YES)})", "write true"),
    (rf"(?i:{'|'.join(NO)})", "write false"),
    *NUMBERS,
    (r'"([^"\']*\\[^"\']*)"', r"write it in single quotes, which leave \\ unchanged: '\1'"),
    (r"([A-Za-z/~.][^\"'\\]*)", r'quote it: "\1"'),
)
"""Patterns of values that aren't TOML, and how to write them; the first counts."""


def explain_syntax(error: tomli.TOMLDecodeError, path: str) -> ConfigError:
    """Return the error of a TOML that can't be parsed: the line, a caret, the right spelling."""
    lines = error.doc.split("\n")
    number, column = min(error.lineno, len(lines)), error.colno - 1
    if not lines[number - 1].strip() and number > 1:  # the end of the line came too early
        number -= 1
        column = len(lines[number - 1]) - 1
    line = lines[number - 1]
    pointer = underline(line, column, column + 1)
    value = re.match(r"\s*[\w.\"'-]+\s*=\s*([^#\n]*)", line)
    fix = _rewritten(value[1].strip(), SLIPS) if value else ""
    fixes = [f"  fix: {fix}"] if fix else []
    return ConfigError("", "\n".join([f"{path}:{number}: not TOML: {error.msg}", *pointer, *fixes]))


def _rewritten(value: str, rules: Iterable[tuple[str, str]]) -> str:
    """Return the advice of the first rule that the value matches; "" if there is none."""
    if re.fullmatch(THOUSANDS, value):
        return f"write {value.replace(',', '_')}"
    found = ((re.fullmatch(pattern, value), advice) for pattern, advice in rules)
    return next((match.expand(advice) for match, advice in found if match), "")


@cache
def read_synonyms() -> dict[str, dict[str, str]]:
    """Return the tables of `synonyms.toml`, each from another framework's name, in small letters
    without underscores, to ours."""
    tables = tomli.loads(Path(__file__).with_name("synonyms.toml").read_text("utf-8"))
    return {
        title: {_bare(name): ours for ours, names in table.items() for name in names.split()}
        for title, table in tables.items()
    }


def _known_elsewhere() -> Mapping[str, str]:
    """Return what is known of other frameworks' keys: ours, or advice."""
    return read_synonyms()["keys"] | read_synonyms()["advice"]


def suggest_key(key: Sequence[str]) -> str:
    """Return advice on an unknown key, as the text of a `fix:` line.

    Args:
        key: its parts: section, ..., name; or only the name if it stands outside a section.
    """
    *tables, name = key
    advice = read_synonyms()["advice"]
    for written in (".".join(key), name):
        if fix := advice.get(_bare(written)):
            return fix
    if meant := next(filter(None, _meant(tuple(tables), name)), ""):
        return f"did you mean {meant}?"
    if name in JobConfig.model_fields:
        return f"did you mean {name}.enable?" if "enable" in _keys_of(name) else f"write [{name}]"
    place = tables[0] if tables and tables[0] in JobConfig.model_fields else ""
    of_which = f"the keys of [{place}]" if place else "every key"
    help_of = f"meshwright config --help {place}".strip()
    return f"leave it out; `{help_of}` documents {of_which}"


def _meant(inside: Key, name: str) -> Iterator[str]:
    """Yield the key, or keys, that may be meant, the surest first; "" where a rule knows none."""
    synonyms, bare = read_synonyms()["keys"], _bare(name)
    section = find_section(inside) if inside else None
    siblings = list(section.model_fields) if section else []
    known = [found for found, _ in all_keys()]
    plain = {found[-1] for found in known if len(found) == 2}  # which hide those further inside
    everywhere = [found for found in known if len(found) == 2 or found[-1] not in plain]
    yield synonyms.get(_bare(".".join((*inside, name))), "")
    yield _either((*inside, sibling) for sibling in siblings if _bare(sibling) == bare)
    parts_of = [(*inside, sibling) for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    yield _either(parts_of + [found for found in everywhere if _bare(found[-1]) == bare])
    target = synonyms.get(bare, "")  # of one key: the key of that name in this section, if it has
    last = target.rpartition(".")[2]
    yield ".".join((*inside, last)) if last in siblings and " " not in target else target
    yield _either((*inside, near) for near in nearest(name, siblings))
    near_anywhere = nearest(name, {found[-1] for found in everywhere})
    yield _either(found for found in everywhere if found[-1] in near_anywhere)
    long = [word for word in synonyms if len(word) > 5 and "." not in word]
    yield from (synonyms[near] for near in nearest(bare, long, ALIKE_SYNONYM))


def suggest_section(name: str, keys: Iterable[str]) -> str:
    """Return advice on an unknown section with these keys, as the text of a `fix:` line."""
    sections, wanted, synonyms = list(JobConfig.model_fields), set(keys), read_synonyms()
    if len(wanted) == 1 and _bare(key := min(wanted)) in _known_elsewhere():
        return suggest_key((key,))  # as Lightning's trainer.max_steps
    holding = [section for section in sections if wanted and wanted <= _keys_of(section)]
    theirs = synonyms["sections"].get(_bare(name))
    guesses = [theirs] if theirs else nearest(name, sections) or holding
    if len(guesses) == 1:
        return f"did you mean {guesses[0]}?"
    return f"leave it out; the sections are {', '.join(sections)}"


def nearest(
    wrong: str, valid: Iterable[str], alike: float = ALIKE, *, may_lack_digits: bool = False
) -> list[str]:
    """Return the one of `valid` that `wrong` is a typing error of; empty if there is none.

    Args:
        may_lack_digits: "bfloat" may be "bfloat16". Otherwise digits have to be equal: beta1 is no
            typing error of beta2, nor size_8b of size_3b.
    """
    digits = re.sub(r"\D", "", wrong)
    may_be = {
        _spelled(name): name
        for name in valid
        if re.sub(r"\D", "", name) == digits or (may_lack_digits and not digits)
    }
    return [may_be[near] for near in get_close_matches(_spelled(wrong), may_be, 1, alike)]


def _either(keys: Iterable[Key]) -> str:
    return " or ".join(sorted({".".join(key) for key in keys}))


def _keys_of(section: str) -> set[str]:
    declared = find_section((section,))
    assert declared is not None
    return set(declared.model_fields)


def _bare(name: str) -> str:
    """As keys are compared: `seq-len`, `Seq_Len` and `seqLen` are one."""
    return _spelled(name).replace("_", "")


def _spelled(name: str) -> str:
    return name.lower().replace("-", "_")
