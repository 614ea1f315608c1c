"""Keeps a checkpoint from being deleted while it is read. Free of torch."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from meshwright.checkpoint.flushing import UNSUPPORTED, mount_of, warn_once
from meshwright.checkpoint.manifest import MANIFEST, DamagedError


@contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """Keep every job's retention from deleting `checkpoint` meanwhile.

    A shared flock on its manifest. On a file system without flock there is no protection, and the
    log says so.

    Raises:
        DamagedError: if it is not there, or no longer.
    """
    path = checkpoint / MANIFEST
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error.strerror}") from None
    with file:
        is_ours = lock(file, fcntl.LOCK_SH, path)
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not (is_ours and is_there):
            raise DamagedError(checkpoint, "another job has just deleted it")
        yield


def lock(file: IO[bytes], kind: int, path: Path) -> bool:
    """Take a flock on `file`; whether nobody holds one that excludes it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.ENOLCK}:
            raise
        warn_once(
            f"the file system at {mount_of(path)} has no flock ({error.strerror}): a "
            "checkpoint may be deleted while it is read"
        )
    return True
