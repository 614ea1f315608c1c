"""Sources are drawn by their shares, in an order that never changes."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from meshwright.datasets.order import Mixture


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [0.7, 0.2, 0.1], [5, 3, 2, 7, 11], [1e-3, 1], [0.1] * 10, [3e9, 1e9, 7]],
)
def test_shares_are_within_one_sample_at_any_moment(weights: list[float]) -> None:
    mixture, total = Mixture(weights), sum(weights)
    for n in range(1, 3000):
        mixture.draw()
        assert sum(mixture.counts) == n
        for count, weight in zip(mixture.counts, weights, strict=True):
            assert abs(count - weight * n / total) < 1


def drawn_by_looking_at_all(weights: Sequence[float], counts: list[int], draws: int) -> list[int]:
    """The definition, as the first release computed it: looks at every source at each draw."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    total, counts, drawn = sum(whole), list(counts), []
    slack = Fraction(total, max(2 * len(weights) - 2, 1))
    for n in range(sum(counts) + 1, sum(counts) + 1 + draws):
        behind = [weight * n - count * total for weight, count in zip(whole, counts, strict=True)]
        late = [k for k, distance in enumerate(behind) if distance >= slack]
        if len(weights) == 1:
            late = [0]
        chosen = min(late, key=lambda k: (total - slack - behind[k]) / whole[k])
        counts[chosen] += 1
        drawn.append(chosen)
    return drawn


RNG = random.Random(0)
KINDS = {
    "equal": lambda: 1,
    "small numbers, with ties": lambda: RNG.randint(1, 5),
    "fractions": RNG.random,
    "token budgets of any size": lambda: 10 ** RNG.uniform(-6, 12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_definition(kind: str) -> None:
    """To the sample, also from the middle on: a run of before resumes in the same order."""
    for sources in range(1, 13):
        weights = [KINDS[kind]() for _ in range(sources)]
        want = drawn_by_looking_at_all(weights, [0] * sources, 240)
        mixture = Mixture(weights)
        drawn = [mixture.draw() for _ in range(120)]
        resumed = Mixture(weights, mixture.counts)
        assert drawn + [resumed.draw() for _ in range(120)] == want, weights
        assert resumed.counts == [want.count(source) for source in range(sources)]
