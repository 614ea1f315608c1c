"""The key that an unknown one probably stands for, or silence."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from meshwright.config.command_line import Key
from meshwright.config.fields import all_keys, find_section
from meshwright.config.job_config import JobConfig
from meshwright.config.synonyms import NOT_HERE, SECTIONS, SYNONYMS

ALIKE = 0.8
"""Least share of equal letters of a typing error; "lrr" and "lr" have 0.8."""
MOST_CHOICES = 4


def suggest_key(key: Sequence[str]) -> str:
    """Return advice on an unknown key, as the text of a `fix:` line.

    Args:
        key: its parts: section, ..., name; or the name alone if it stands outside a section.
    """
    *tables, name = key
    inside = tuple(tables)
    section = find_section(inside)
    siblings = list(section.model_fields) if inside and section is not None else []
    if name in SYNONYMS.get(".".join(inside), {}):
        return f"did you mean {SYNONYMS['.'.join(inside)][name]}?"
    if near := _nearest(name, siblings):
        return _did_you_mean([(*inside, near)])
    parts_of = [sibling for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    elsewhere = [found for found, _ in all_keys() if found[-1] == _plain(name)]
    choices = [*((*inside, sibling) for sibling in parts_of), *elsewhere]
    if 0 < len(choices) <= MOST_CHOICES:
        return _did_you_mean(choices)
    known = {_bare(synonym): target for synonym, target in SYNONYMS[""].items()}
    absent = {_bare(word): why for word, why in NOT_HERE.items()}
    bare = _bare(name)
    if bare in absent:
        return absent[bare]
    if bare in known:
        return f"did you mean {known[bare]}?"
    if near := _nearest(name, [found[-1] for found, _ in all_keys()]):
        return _did_you_mean([found for found, _ in all_keys() if found[-1] == near])
    if near := _nearest(bare, [word for word in known if len(word) > 4]):
        return f"did you mean {known[near]}?"
    place = inside[0] if inside and inside[0] in JobConfig.model_fields else ""
    return f"leave it out; `meshwright config --help{place and ' '}{place}` documents " + (
        f"the keys of [{place}]" if place else "every key"
    )


def suggest_section(name: str, keys: Iterable[str]) -> str:
    """Return advice on an unknown section, as the text of a `fix:` line.

    Args:
        keys: those that it holds.
    """
    sections = list(JobConfig.model_fields)
    if _bare(name) in SECTIONS:
        return f"did you mean {SECTIONS[_bare(name)]}?"
    if near := _nearest(name, sections):
        return f"did you mean {near}?"
    wanted = set(keys)
    holding = [s for s in sections if wanted and wanted <= _names_in(s)]
    if len(holding) == 1:
        return f"did you mean {holding[0]}?"
    return f"leave it out; the sections are {', '.join(sections)}"


def nearest(wrong: str, valid: Iterable[str]) -> str | None:
    """Return the one of `valid` that `wrong` is a typing error of, if there is one."""
    return _nearest(wrong, list(valid))


def _nearest(wrong: str, valid: Sequence[str]) -> str | None:
    plain = _plain(wrong)
    by_plain = {_plain(name): name for name in valid}
    if plain in by_plain:
        return by_plain[plain]
    ratio, best = max(
        ((SequenceMatcher(None, plain, name).ratio(), name) for name in by_plain),
        default=(0.0, ""),
    )
    # numbers are no typing errors of each other: beta1 is not beta2, nor llama3_8b llama3_3b
    if ratio < ALIKE or _digits(plain) != _digits(best):
        return None
    return by_plain[best]


def _did_you_mean(keys: Sequence[Key]) -> str:
    names = sorted({".".join(key) for key in keys})
    return f"did you mean {' or '.join(names)}?"


def _names_in(section: str) -> set[str]:
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
    return "".join(character for character in name if character.isdigit())
