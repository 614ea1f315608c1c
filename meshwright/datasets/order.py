"""In which order the documents of an epoch are read: a permutation that needs no memory."""

import hashlib


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
