"""Guesses the key that an unknown key stands for, or says nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tomli

from meshwright.config.fields import Key, all_keys, find_section
from meshwright.config.job_config import JobConfig

ALIKE = 0.74
"""Least share of equal letters of a typing error: "anme" and "name" have 0.75."""

ALIKE_SYNONYM = 0.88

MOST_CHOICES = 4


class Synonyms(NamedTuple):
    """Names of other frameworks, in small letters without underscores, and ours."""

    keys: dict[str, str]
    advice: dict[str, str]
    sections: dict[str, str]


@cache
def read_synonyms() -> Synonyms:
    """Read `synonyms.toml`, which says what is in it."""
    tables = tomli.loads(Path(__file__).with_name("synonyms.toml").read_text("utf-8"))
    return Synonyms(**{name: _by_theirs(names) for name, names in tables.items()})


def _by_theirs(table: Mapping[str, str]) -> dict[str, str]:
    return {_bare(theirs): ours for ours, names in table.items() for theirs in names.split()}


def suggest_key(key: Sequence[str]) -> str:
    """Return advice on an unknown key, as the text of a `fix:` line.

    Args:
        key: its parts: section, ..., name; or the name alone if it stands outside a section.
    """
    *tables, name = key
    return next(filter(None, _advice_on_key(tuple(tables), name)))


def _advice_on_key(inside: Key, name: str) -> Iterator[str]:
    """Yield advice, the surest first; "" where a rule knows nothing."""
    theirs, bare = read_synonyms(), _bare(name)
    section = find_section(inside) if inside else None
    siblings = list(section.model_fields) if section else []
    known = [found for found, _ in all_keys()]
    plain = {found[-1] for found in known if len(found) == 2}  # which hide those further inside
    everywhere = [found for found in known if len(found) == 2 or found[-1] not in plain]
    yield _did_you_mean(theirs.keys.get(_bare(".".join((*inside, name)))) if inside else None)
    yield _one_of((*inside, sibling) for sibling in siblings if sibling == _plain(name))
    parts_of = [(*inside, sibling) for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    choices = parts_of + [found for found in everywhere if found[-1] == _plain(name)]
    yield _one_of(choices if len(choices) <= MOST_CHOICES else ())
    yield theirs.advice.get(bare, "")
    yield _did_you_mean(_in_section(theirs.keys.get(bare), inside, siblings))
    yield _one_of((*inside, near) for near in nearest(name, siblings))
    near_anywhere = nearest(name, {found[-1] for found in everywhere})
    yield _one_of(found for found in everywhere if found[-1] in near_anywhere)
    long = [word for word in theirs.keys if len(word) > 5 and "." not in word]
    yield from (_did_you_mean(theirs.keys[near]) for near in nearest(bare, long, ALIKE_SYNONYM))
    if name in JobConfig.model_fields:
        yield f"did you mean {name}.enable?" if "enable" in _keys_of(name) else f"write [{name}]"
    place = inside[0] if inside and inside[0] in JobConfig.model_fields else ""
    yield f"leave it out; `meshwright config --help{place and ' '}{place}` documents " + (
        f"the keys of [{place}]" if place else "every key"
    )


def suggest_section(name: str, keys: Iterable[str]) -> str:
    """Return advice on an unknown section, as the text of a `fix:` line.

    Args:
        keys: the section's keys.
    """
    sections, wanted = list(JobConfig.model_fields), set(keys)
    holding = [section for section in sections if wanted and wanted <= _keys_of(section)]
    theirs = read_synonyms().sections.get(_bare(name))
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
    digits = _digits(wrong)
    may_be = {
        _plain(name): name
        for name in valid
        if _digits(name) == digits or (may_lack_digits and not digits)
    }
    return [may_be[near] for near in get_close_matches(_plain(wrong), may_be, 1, alike)]


def _in_section(target: str | None, inside: Key, siblings: Sequence[str]) -> str | None:
    """Return `target`, or, if it is one key, the key of that name in the section `inside`."""
    section, _, name = (target or "").rpartition(".")
    return ".".join((*inside, name)) if name in siblings and " " not in section else target


def _did_you_mean(target: str | None) -> str:
    return f"did you mean {target}?" if target else ""


def _one_of(keys: Iterable[Key]) -> str:
    return _did_you_mean(" or ".join(sorted({".".join(key) for key in keys})))


def _keys_of(section: str) -> set[str]:
    declared = find_section((section,))
    assert declared is not None
    return set(declared.model_fields)


def _plain(name: str) -> str:
    """As keys are written: `seq-len`, `Seq_Len` and `seqLen` are one."""
    spaced = "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name))
    spaced = name if name.isupper() or "_" in name or "-" in name else spaced
    return spaced.lower().replace("-", "_")


def _bare(name: str) -> str:
    return _plain(name).replace("_", "")


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
