"""What lies on the disk."""

import builtins
import errno
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.system.files import warn_once

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


def contents(folder: Path) -> dict[str, bytes]:
    """By the path of each file below `folder`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def flip_bit(path: Path, position: int) -> None:
    """Change the bit at `position`, counted from the first of the file."""
    with open(path, "r+b") as file:
        file.seek(position // 8)
        byte = file.read(1)[0]
        file.seek(position // 8)
        file.write(bytes([byte ^ 1 << position % 8]))


@contextmanager
def failing_reads(name: str, number: int, times: int) -> Iterator[list[str]]:
    """The first `times` that a file called `name` is opened or looked at, the system says `number`.

    No retry waits meanwhile. Yields the files whose reading failed.
    """
    failed: list[str] = []

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(path, str | Path) and Path(path).name == name and len(failed) < times:
                failed.append(str(path))
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **options)

        return call

    with (
        patch("builtins.open", failing(builtins.open)),
        patch("io.open", failing(io.open)),
        patch("os.stat", failing(os.stat)),
        patch("meshwright.system.retries.RETRY_AFTER_S", (0.0, 0.0)),
    ):
        yield failed


@contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """This process can make no file longer than that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
