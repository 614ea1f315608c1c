"""In which order an epoch is read: permutations that need no memory."""

import functools
import hashlib
import math

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
    Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 15)."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def permutation(n: int, *key: int) -> npt.NDArray[np.int64]:
    """Return a whole permutation of 0 .. n-1 that `key` fixes, for small n."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    # its stream of bits is fixed for good (NEP 19), unlike numpy's shuffle
    bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(bits, kind="stable")
