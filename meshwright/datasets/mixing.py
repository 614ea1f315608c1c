"""Which source each sample of a mixture comes from."""

import math
from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """Draws sources so that after n draws each has been drawn n times its share, to within one.

    Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32: of the
    sources that are far enough behind their share, the one that would first fall a whole sample
    behind. The distance stays at or below 1 - 1/(2K - 2) for K sources, at every n. It is computed
    in whole numbers, so it does not drift.

    Args:
        weights: any positive numbers; what counts is their ratio, exact in their decimal digits.
        counts: draws so far, by source.
    """

    def __init__(self, weights: Sequence[float], counts: Sequence[int] = ()) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * scale) for fraction in fractions]
        self._total = sum(self._weights)
        self._slack = Fraction(self._total, max(2 * len(weights) - 2, 1))
        self.counts = list(counts) or [0] * len(weights)

    def draw(self) -> int:
        """The source of the next sample."""
        n = sum(self.counts) + 1
        if len(self.counts) == 1:
            self.counts[0] = n
            return 0
        # all in units of 1 / total: how far each is behind its share once n are drawn
        pairs = zip(self._weights, self.counts, strict=True)
        behind = [weight * n - count * self._total for weight, count in pairs]
        late = [k for k, distance in enumerate(behind) if distance >= self._slack]
        chosen = min(late, key=lambda k: (self._total - self._slack - behind[k]) / self._weights[k])
        self.counts[chosen] += 1
        return chosen
