"""Whether a .zst file is whole: its reader takes a file that was cut off for one that ends there.

Source: RFC 8878, section 3.1. Blocks are passed over, not decompressed.
"""

from pathlib import Path
from typing import BinaryIO

MAGIC = 0xFD2FB528
SKIPPABLE = range(0x184D2A50, 0x184D2A60)
RLE, RESERVED = 1, 3
"""Types of blocks: one byte, repeated; none."""


class CutError(Exception):
    """The file ends within a frame, or is none."""


def check_whole(path: str | Path) -> None:
    """Raise `CutError` unless the file holds whole zstd frames and nothing else."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        while file.tell() < size:
            _pass_frame(file)
            if file.tell() > size:
                raise CutError("the file is cut off")
        if not size:
            raise CutError("the file is empty")


def _pass_frame(file: BinaryIO) -> None:
    magic = _number(file, 4)
    if magic in SKIPPABLE:
        file.seek(_number(file, 4), 1)
        return
    if magic != MAGIC:
        raise CutError("not zstd, or damaged")
    descriptor = _number(file, 1)
    is_single, has_checksum = descriptor & 0x20, descriptor & 0x04
    window = 0 if is_single else 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    file.seek(window + dictionary + content, 1)
    is_last = False
    while not is_last:
        header = _number(file, 3)
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == RESERVED:
            raise CutError("damaged")
        file.seek(1 if kind == RLE else size, 1)
    file.seek(4 if has_checksum else 0, 1)


def _number(file: BinaryIO, size: int) -> int:
    read = file.read(size)
    if len(read) < size:
        raise CutError("the file is cut off")
    return int.from_bytes(read, "little")
