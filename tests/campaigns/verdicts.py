"""Simulates sequences of paired differences, looks after every pair, and counts the verdicts.

    python -m tests.campaigns.verdicts --sequences 40000 --seed 0

For each distribution without effect: the share of sequences that get "better" or "worse" at any of
their pairs, and whose interval misses the true difference at any. Then the power, and the pairs
that it takes, by the size of the effect in spreads; and those of other widths of the mixture.
"""

import argparse
import math

import numpy as np

from meshwright.commands.experiment import verdict
from meshwright.commands.experiment.verdict import Pair, alpha_of, half_width, judge

PAIRS = 12
EFFECTS = (0.5, 1, 2, 4, 8)
"""In spreads."""
WIDTHS = (9, 25, 49, 100, 200)
ARMS = (1, 3, 9)


def bounds_of(arm: int) -> np.ndarray:
    """Half widths after 1, 2, ... pairs, in standard errors."""
    return np.array([half_width(count, alpha_of(arm)) for count in range(1, PAIRS + 1)])


def statistics_of(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors after each pair: (sequences, pairs) each."""
    counts = np.arange(1, differences.shape[1] + 1)
    sums, squares = differences.cumsum(1), (differences**2).cumsum(1)
    with np.errstate(all="ignore"):
        variance = (squares - sums**2 / counts) / (counts - 1)
        return sums / counts, np.sqrt(variance / counts)


def misses(differences: np.ndarray, arm: int, truth: float = 0.0) -> np.ndarray:
    """Whether the interval leaves out `truth` after each pair."""
    means, errors = statistics_of(differences)
    with np.errstate(all="ignore"):
        return np.abs(means - truth) > bounds_of(arm) * errors


def check_judge(differences: np.ndarray, arm: int) -> None:
    """Compare the verdicts of the product with these arrays."""
    hits = misses(differences, arm).any(1)
    for row, hit in zip(differences, hits, strict=True):
        word = judge((Pair(float(d)) for d in row), alpha_of(arm), margin=0.0).word
        assert (word in ("better", "worse")) == hit, (word, row)


def power(draws: np.ndarray, effect: float, arm: int) -> str:
    hits = misses(draws + effect, arm)
    first = np.where(hits.any(1), hits.argmax(1) + 1, PAIRS)
    return f"{hits.any(1).mean():.2f} ({first.mean():.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, shape = np.random.default_rng(given.seed), (given.sequences, PAIRS)
    normal = draw.standard_normal(shape)
    kinds = {
        "normal": normal,
        "Student's t, 3 degrees": draw.standard_t(3, shape),
        "skewed: exponential - 1": draw.exponential(1, shape) - 1,
    }
    for arm in ARMS:
        check_judge(normal[:200] + draw.choice(EFFECTS, (200, 1)), arm)
        least = next(n for n in range(2, 99) if half_width(n, alpha_of(arm)) < math.inf)
        print(f"arm {arm}: alpha {alpha_of(arm):.5f}, at least {least} pairs")
        for name, draws in kinds.items():
            wrong = misses(draws, arm).any(1).mean()
            print(f"  {name:24s} false better or worse: {100 * wrong:.2f} %")
        covered = 1 - misses(normal + 1, arm, truth=1.0).any(1).mean()
        print(f"  interval holds the true difference at all looks: {100 * covered:.2f} %")
    margin = 2.0  # an effect of just the margin is a false "equal"
    words = [
        judge(map(Pair, map(float, row)), alpha_of(1), margin).word
        for row in normal[:4000] + margin
    ]
    print(
        f'false "equal" at a true effect of the margin: {100 * words.count("equal") / 4000:.2f} %'
    )
    print(f"power, and mean pairs of at most {PAIRS}, at effects of {EFFECTS} spreads")
    chosen = verdict.MIXTURE_WIDTH
    for width in WIDTHS:
        verdict.MIXTURE_WIDTH = float(width)
        mark = " *" if width == chosen else ""
        for arm in ARMS:
            cells = "  ".join(power(normal, effect, arm) for effect in EFFECTS)
            print(f"  width {width:3d}, arm {arm}: {cells}{mark}")


if __name__ == "__main__":
    main()
