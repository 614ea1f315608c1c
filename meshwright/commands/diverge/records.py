"""The first step at which the records of two runs differ. Free of torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.commands.replay.compared import number, relative
from meshwright.commands.replay.recorded import RecordedRun
from meshwright.metrics.report.run import Row

WORDS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "norms": "gradient norm of",
    "optimizer": "optimizer state of",
    "weights": "weights of",
}
"""Of what a step has, in the order of computation."""

SUMS = ("optimizer", "weights")
"""Sums of bits, which are equal or not."""


@dataclass(frozen=True)
class OtherStep:
    """A step that two records have in different ways."""

    step: int
    names: Sequence[str]
    """What differs, in the order of computation."""
    largest: float
    """Relative difference of loss and norms; 0: only bits of the weights or of the state."""

    @property
    def groups(self) -> set[str]:
        """The groups of parameters whose weights or state differ; none, if that isn't logged."""
        starts = tuple(WORDS[key] for key in SUMS)
        return {name.rpartition(" ")[2] for name in self.names if name.startswith(starts)}


def other_steps(a: RecordedRun, b: RecordedRun) -> Iterator[OtherStep]:
    """Yield the steps that don't have the same bits in both records."""
    groups = a.groups if a.groups == b.groups else []
    for step in sorted(a.steps.keys() & b.steps.keys()):
        if found := compare_rows(a.steps[step], b.steps[step], groups):
            yield OtherStep(step, list(found), max(found.values()))


def compare_rows(a: Row, b: Row, groups: Sequence[str]) -> dict[str, float]:
    """Return what two lines of a record have in different bits, with the relative differences of
    loss and norms; sums of bits have none, so theirs is 0."""
    return {
        name: 0.0 if key in SUMS else relative(number(left), number(right))
        for key, words in WORDS.items()
        for name, left, right in _pairs(a.get(key), b.get(key), words, groups)
        if _recorded(left) != _recorded(right)
    }


def _recorded(value: Any) -> Any:
    """Return a value as a record has it, with None for a number that isn't finite: lines that were
    just computed have that number, and not a number isn't equal to itself."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _pairs(a: Any, b: Any, words: str, groups: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, list) and isinstance(b, list):
        for group, left, right in zip(groups, a, b, strict=False):
            yield f"{words} {group}", left, right
    elif not isinstance(a, list) and not isinstance(b, list):
        yield words, a, b


def has_other_rates(a: RecordedRun, b: RecordedRun) -> bool:
    """Return whether a step that both have logged had different learning rates."""
    rates: list[Mapping[int, float]] = [dict(one.run.series("optim/lr")) for one in (a, b)]
    return any(rates[0][step] != rates[1][step] for step in rates[0].keys() & rates[1].keys())
