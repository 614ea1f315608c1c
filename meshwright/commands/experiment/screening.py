"""Screening by successive halving, on seeds of its own: an arm that it drops gets no verdict.

Source: Jamieson and Talwalkar 2016, arXiv:1502.07943, fig. 1. Ranks at few steps mislead where
learning rates differ, so keep generously.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from meshwright.commands.experiment.registry import Arm
from meshwright.commands.experiment.results import LAST_QUARTER, Key, Result
from meshwright.commands.experiment.spec import Screening


class Halving(NamedTuple):
    """Where a screening is."""

    keep: int
    left: list[Arm]
    """Arms of this round; when it's over, the survivors, the best first."""
    part: float
    """Of the budget, which this round trains; 0: it's over."""
    missing: list[Key]
    """Runs that this round lacks."""
    dropped: dict[str, float]
    """By arm: the part of the budget after which it was dropped."""


def halve(
    screen: Screening,
    arms: Sequence[Arm],
    steps_of: Callable[[Arm], int],
    results: Mapping[Key, Result],
) -> Halving:
    """Return the first round that lacks a run, or the end: a function of the results only.

    Each round trains twice as long as the one before, from where that ended, and half of the arms
    stay: those with the lowest means over the seeds.
    """
    left, dropped = [*arms], dict[str, float]()
    rounds = math.ceil(math.log2(len(left) / screen.keep)) if len(left) > screen.keep else 0
    for following in reversed(range(rounds)):
        part, means = screen.steps / 2**following, dict[str, float]()
        missing = list[Key]()
        for arm in left:
            keys = [Key(arm.name, seed) for seed in screen.seeds]
            steps = steps_at(part, steps_of(arm))
            values = [mean_at(results.get(key), steps) for key in keys]
            known = [value for value in values if value is not None]
            missing += [key for key, value in zip(keys, values, strict=True) if value is None]
            means[arm.name] = fmean(known) if known else math.inf
        if missing:
            return Halving(screen.keep, left, part, missing, dropped)
        left.sort(key=lambda arm: (means[arm.name], arm.number))
        count = max(screen.keep, math.ceil(len(left) / 2)) if following else screen.keep
        dropped |= {arm.name: part for arm in left[count:]}
        del left[count:]
    return Halving(screen.keep, left, 0.0, [], dropped)


def steps_at(part: float, steps: int) -> int:
    """Return the steps of a part of a budget."""
    return max(round(part * steps), 1)


def mean_at(result: Result | None, steps: int) -> float | None:
    """Return the mean of the validations of the last quarter of `steps`; None: the run isn't that
    far, or it failed, which says nothing about the arm. One that diverged is the worst."""
    if result is None or result.status == "failed":
        return None
    if result.status == "finished" and result.steps < steps:
        return None
    late = [value for step, value in result.curve if LAST_QUARTER * steps <= step <= steps]
    return fmean(late) if late else math.inf
