"""In which order an epoch is read: permutations that need no memory."""

import hashlib

import numpy as np
import numpy.typing as npt


def permuted(index: int, n: int, seed: int, epoch: int) -> int:
    """Where `index` goes in a permutation of 0 .. n-1 that `seed` and `epoch` fix.

    A balanced Feistel network over the next even number of bits, repeated until the result lies
    below n. Source: Luby and Rackoff 1988 (four rounds give a pseudo-random permutation); Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3 (cycle walking, fewer than
    four repeats on average).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            message = f"{seed}/{epoch}/{round_}/{right}".encode()
            digest = hashlib.blake2b(message, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < n:
            return index


def permutation(n: int, *key: int) -> npt.NDArray[np.int64]:
    """A whole permutation of 0 .. n-1 that `key` fixes, for small n."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    # its stream of bits is fixed for good (NEP 19), unlike that of numpy's shuffle
    bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(bits, kind="stable")
