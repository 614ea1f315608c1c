"""tiktoken's files: a line for each token, its base64 and its rank."""

import base64
import binascii
import re

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)")


def is_tiktoken(content: bytes) -> bool:
    """Return whether the first line is a base64 token and its rank; no sentencepiece model begins
    so."""
    return _LINE.fullmatch(content.split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Rank of each token.

    Raises:
        ValueError: if the ranks are not 0, 1, 2 ..., or a byte has none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        found = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(found[1]) if found else b""
        except binascii.Error:
            token = b""
        if not found or not token:
            raise ValueError(f"line {number} is not a base64 token and its rank: {line[:40]!r}")
        if int(found[2]) != number - 1 or token in ranks:
            raise ValueError(f"line {number} gives rank {int(found[2])} to {token!r}, out of order")
        ranks[token] = number - 1
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"has no token for the byte 0x{missing[0]:02x}; is it cut off?")
    return ranks
