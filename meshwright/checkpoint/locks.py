"""Keeps a checkpoint from being deleted while it is read. Free of torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST, DamagedError
from meshwright.file_system import ABSENT, lock, read_patiently

RISK = "a checkpoint may be deleted while it is read"
"""Where there is no flock."""


@contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """Keep every job's retention from deleting `checkpoint` meanwhile.

    A shared flock on its manifest. On a file system without flock there is no protection, and the
    log says so.

    Raises:
        DamagedError: if it is not there, or no longer.
        StorageError: if it cannot be read now.
    """
    path = checkpoint / MANIFEST
    try:
        file = read_patiently(path, lambda: open(path, "rb"))  # noqa: SIM115
    except ABSENT as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error.strerror}") from None
    with file:
        is_ours = lock(file, fcntl.LOCK_SH, path, RISK)
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not (is_ours and is_there):
            raise DamagedError(checkpoint, "another job has just deleted it")
        yield
