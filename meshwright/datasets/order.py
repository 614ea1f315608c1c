"""In which order an epoch is read: permutations that need no memory."""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1


def permuted(index: int, n: int, seed: int, epoch: int) -> int:
    """Return where `index` goes in a permutation of 0 .. n-1 that `seed` and `epoch` fix.

    A Feistel network of four rounds over pairs (left, right) of which there are n or a few more,
    repeated until the result lies below n. Source: Luby and Rackoff 1988 (four rounds give a
    pseudo-random permutation); Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
    sections 3 (repeating) and 5 (pairs of other ranges than powers of two).
    """
    num_left = math.isqrt(n - 1) + 1
    num_right = -(-n // num_left)
    keys = _round_keys(seed, epoch)
    while True:
        right, left = divmod(index, num_left)
        left = (left + _mixed(right ^ keys[0])) % num_left
        right = (right + _mixed(left ^ keys[1])) % num_right
        left = (left + _mixed(right ^ keys[2])) % num_left
        right = (right + _mixed(left ^ keys[3])) % num_right
        index = right * num_left + left
        if index < n:
            return index


@functools.lru_cache(16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Four of 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=32).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))


def _mixed(bits: int) -> int:
    """64 bits, each of which depends on all of `bits`: the output function of SplitMix64 (Steele,
    Lea and Flood 2014, "Fast splittable pseudorandom number generators", fig. 15)."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def permutation(n: int, *key: int) -> npt.NDArray[np.int64]:
    """Return a whole permutation of 0 .. n-1 that `key` fixes, for small n."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    # its stream of bits is fixed for good (NEP 19), unlike numpy's shuffle
    bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(bits, kind="stable")


class Mixture:
    """Draws sources so that after n draws each has been drawn n times its share, to within one.

    Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32: of the
    sources that are far enough behind their share, the one that would first fall a whole sample
    behind. The distance stays at or below 1 - 1/(2K - 2) for K sources, at every n. It is computed
    in whole numbers, so it doesn't drift.

    Args:
        weights: any positive numbers; only their ratio counts, exact in their decimal digits.
        counts: draws so far, by source, as draws with these weights made them.
    """

    def __init__(self, weights: Sequence[float], counts: Sequence[int] = ()) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = [int(fraction * scale) for fraction in fractions]
        self.counts = list(counts) or [0] * len(weights)
        self._sources = _draws(whole, self.counts)

    def draw(self) -> int:
        """Return the source of the next sample."""
        return next(self._sources)


def _draws(weights: Sequence[int], count: list[int]) -> Iterator[int]:
    """Yield the sources of all draws that follow `count`, without end, and keep it up to date.

    A task is to draw source k, of weight w, once more after c times. With the total weight T and
    d = 2K - 2, the task is open from draw T(cd + 1) / (wd) on, and due at T((c + 1)d - 1) / (wd).
    Each draw does the open task that is due first; of equals, the first source's. Two heaps
    find it in log K steps, without a look at every source.
    """
    sources, total = len(weights), sum(weights)
    d = max(2 * sources - 2, 1)
    # the factor T / d, common to all dues, is left out; the multiple makes them whole
    multiple = math.lcm(*weights)
    per_task = [multiple // weight for weight in weights]

    def opens(k: int) -> tuple[int, int]:
        """Return the first draw, rounded up, at which the next task of source k is open; and k."""
        return -(-total * (count[k] * d + 1) // (weights[k] * d)), k

    waiting, ready = [opens(k) for k in range(sources)], list[tuple[int, int]]()
    heapify(waiting)
    for n in itertools.count(sum(count) + 1):
        while waiting and waiting[0][0] <= n:
            k = heappop(waiting)[1]
            heappush(ready, (per_task[k] * ((count[k] + 1) * d - 1), k))
        k = heappop(ready)[1]
        count[k] += 1
        heappush(waiting, opens(k))
        yield k
