"""Judges an arm by the differences of its pairs. Standard library only."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

ALPHA = 0.05
"""Probability that any arm of an experiment gets a wrong "better" or "worse", ever."""

MIXTURE_WIDTH = 49.0
"""Variance of the Gaussian mixture over effect / spread. About the smallest with which three pairs
can decide the first two arms, and four all up to the eleventh (tests/campaigns/verdicts.py)."""

MOST_SEEDS = 10_000
"""More aren't predicted."""

Word = Literal["better", "worse", "equal", "identical", "diverged", "open"]


class Pair(NamedTuple):
    """The runs of an arm and of its reference with one seed."""

    difference: float
    """Arm minus reference; inf: the arm diverged, and the reference didn't."""
    is_identical: bool = False
    """All of their validations have equal bits."""


@dataclass(frozen=True)
class Verdict:
    """The result of the pairs of an arm so far."""

    word: Word
    num_pairs: int
    """Pairs with a number, as far as they were needed for the decision."""
    num_diverged: int
    mean: float | None
    """Of the differences; None: there is none."""
    spread: float | None
    """Their standard deviation; None: there are fewer than two."""
    low: float | None
    high: float | None
    """The interval of the true difference; None: it has no bounds yet."""
    seeds_needed: int | None
    """Pairs that decide, if the mean and the spread stay as they are; None: too many to tell, or
    the arm is decided."""


def alpha_of(number: int) -> float:
    """Return the share of `ALPHA` that arm `number` has, counted from 1: shares of any number of
    arms add up to less than `ALPHA`, so a later arm never changes the verdict of an earlier one."""
    return ALPHA / (number * (number + 1))


def half_width(count: int, alpha: float) -> float:
    """Return half of the interval's width after `count` pairs, in standard errors of their mean.

    Over all counts together the interval misses the true difference with probability `alpha`, so
    anybody may look, stop or add pairs at any time. Source: Wang and Ramdas 2023, arXiv:2310.03722,
    the t-test martingale with a Gaussian mixture, solved for t.
    """
    if count < 2:
        return math.inf
    prior = 1 + count * MIXTURE_WIDTH
    a = (math.sqrt(prior) / alpha) ** (2 / count)
    return math.sqrt((count - 1) * (a - 1) / (1 - a / prior)) if a < prior else math.inf


def least_pairs(alpha: float) -> int:
    """Return the smallest number of pairs with which the interval has bounds."""
    return next(count for count in range(2, MOST_SEEDS) if half_width(count, alpha) < math.inf)


def judge(pairs: Iterable[Pair], alpha: float, margin: float) -> Verdict:
    """Judge an arm by its pairs in the order of their seeds, up to the first decision, which then
    stays: more pairs don't take it back.

    Args:
        margin: a difference that is surely smaller is none.
    """
    differences, diverged, low, high = list[float](), 0, -math.inf, math.inf
    word: Word = "open"
    is_identical = True
    for difference, has_equal_bits in pairs:
        if math.isinf(difference):
            diverged += 1
            if diverged == 2:
                word = "diverged"
                break
            continue
        differences.append(difference)
        is_identical = is_identical and has_equal_bits
        count = len(differences)
        if count < 2:
            continue
        if is_identical and not diverged:
            word, low, high = "identical", 0.0, 0.0
            break
        width = half_width(count, alpha)
        # without spread, infinity times it would be no number
        half = width * stdev(differences) / math.sqrt(count) if width < math.inf else width
        # each interval holds with all others, so their intersection does as well
        low, high = max(low, fmean(differences) - half), min(high, fmean(differences) + half)
        if -margin < low and high < margin:
            word = "equal"
        elif low > 0 or high < 0:
            word = "worse" if low > 0 else "better"
        if word != "open":
            break
    return Verdict(
        word,
        num_pairs=len(differences),
        num_diverged=diverged,
        mean=fmean(differences) if differences else None,
        spread=stdev(differences) if len(differences) > 1 else None,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
        seeds_needed=_seeds_needed(differences, alpha, margin) if word == "open" else None,
    )


def _seeds_needed(differences: Sequence[float], alpha: float, margin: float) -> int | None:
    least = max(least_pairs(alpha), len(differences) + 1)
    if len(differences) < 2:
        return least
    mean, spread = abs(fmean(differences)), stdev(differences)
    # a difference is seen, or it is seen to be none
    reach = max(mean, margin - mean)
    counts = range(least, MOST_SEEDS)
    return next((n for n in counts if half_width(n, alpha) * spread < reach * math.sqrt(n)), None)
