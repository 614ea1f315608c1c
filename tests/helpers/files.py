"""What lies on the disk."""

import errno
import os
from pathlib import Path

import pytest

from meshwright.file_system import warn_once

NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""Numbers by which file systems say that they lack a call."""


def leave_out_flock_and_fsync(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make them fail with `number`; warnings, each given once a process, are given again."""

    def lacks(*of_call: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", lacks)
    monkeypatch.setattr("os.fsync", lacks)
    warn_once.cache_clear()


def tree(folder: Path) -> set[str]:
    """Every path below `folder`, for "nothing was written"."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def flip_bit(path: Path, position: int) -> None:
    """Change the bit at `position`, counted from the first of the file."""
    with open(path, "r+b") as file:
        file.seek(position // 8)
        byte = file.read(1)[0]
        file.seek(position // 8)
        file.write(bytes([byte ^ 1 << position % 8]))
