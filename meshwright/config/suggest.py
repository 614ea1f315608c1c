"""The key that an unknown one probably stands for, or silence."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from meshwright.config.fields import Key, all_keys, find_section
from meshwright.config.job_config import JobConfig
from meshwright.config.synonyms import NOT_HERE, SECTIONS, SYNONYMS

ALIKE = 0.8
"""Least share of equal letters of a typing error; "lrr" and "lr" have 0.8."""
ALIKE_SYNONYM = 0.88
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
    by_plain = {_plain(sibling): sibling for sibling in siblings}
    if _plain(name) in by_plain:
        return _did_you_mean([(*inside, by_plain[_plain(name)])])
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
        return f"did you mean {_in_section(known[bare], inside, siblings)}?"
    if near := nearest(name, siblings):
        return _did_you_mean([(*inside, near)])
    if near := nearest(name, [found[-1] for found, _ in all_keys()]):
        return _did_you_mean([found for found, _ in all_keys() if found[-1] == near])
    if near := nearest(bare, [word for word in known if len(word) > 5], ALIKE_SYNONYM):
        return f"did you mean {known[near]}?"
    if name in JobConfig.model_fields:
        has_switch = "enable" in _names_in(name)
        return f"did you mean {name}.enable?" if has_switch else f"write [{name}]"
    place = inside[0] if inside and inside[0] in JobConfig.model_fields else ""
    return f"leave it out; `meshwright config --help{place and ' '}{place}` documents " + (
        f"the keys of [{place}]" if place else "every key"
    )


def suggest_section(name: str, keys: Iterable[str]) -> str:
    """Return advice on an unknown section, as the text of a `fix:` line.

    Args:
        keys: the section's keys.
    """
    sections = list(JobConfig.model_fields)
    if _bare(name) in SECTIONS:
        return f"did you mean {SECTIONS[_bare(name)]}?"
    if near := nearest(name, sections):
        return f"did you mean {near}?"
    wanted = set(keys)
    holding = [s for s in sections if wanted and wanted <= _names_in(s)]
    if len(holding) == 1:
        return f"did you mean {holding[0]}?"
    return f"leave it out; the sections are {', '.join(sections)}"


def nearest(
    wrong: str, valid: Iterable[str], alike: float = ALIKE, *, may_lack_digits: bool = False
) -> str | None:
    """Return the one of `valid` that `wrong` is a typing error of, if there is one.

    Args:
        may_lack_digits: "bfloat" may be "bfloat16". Otherwise digits have to be equal: beta1 is no
            typing error of beta2, nor size_8b of size_3b.
    """
    plain = _plain(wrong)
    best, most = None, alike
    for name in valid:
        likeness = _likeness(plain, _plain(name))
        digits = _digits(wrong)
        if likeness >= most and (digits == _digits(name) or (may_lack_digits and not digits)):
            best, most = name, likeness
    return best


def _likeness(a: str, b: str) -> float:
    """Share of equal letters; one wrong letter, or two in each other's place, are always alike."""
    ratio = SequenceMatcher(None, a, b).ratio()
    if len(a) != len(b) or len(a) < 4:
        return ratio
    wrong = sum(map(str.__ne__, a, b))
    return max(ratio, 0.9) if wrong == 1 or (wrong == 2 and sorted(a) == sorted(b)) else ratio


def _in_section(target: str, inside: Key, siblings: Sequence[str]) -> str:
    """`target`, or the key of that name in the section at hand."""
    if " " in target:  # several
        return target
    name = target.rpartition(".")[2]
    return ".".join((*inside, name)) if name in siblings else target


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
