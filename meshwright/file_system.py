"""Writes, flushes and locks files, also where a file system cannot flush or lock. No torch."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, BinaryIO

from meshwright.log import logger

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors by which a file system says that it lacks a call."""


def sync_file(descriptor: int, path: Path) -> None:
    """Flush an open file or folder to the disk.

    A file system without fsync is named in the log, once.

    Raises:
        OSError: if the disk fails, or is full.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        kind = "a folder" if path.is_dir() else "a file"
        warn_once(
            f"the file system at {mount_of(path)} cannot flush {kind} to the disk "
            f"({error.strerror}): a power cut may damage the newest files"
        )


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk; see `sync_file`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warn_once(f"the file system at {mount_of(folder)} cannot open a folder: {error.strerror}")
        return
    try:
        sync_file(descriptor, folder)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file that takes the name `path` once it is whole and on the disk.

    After an error inside, it is gone, and `path` as before.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno(), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make `folder` and the folders above it, each flushed to the disk under its name."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def lock(file: IO[Any], kind: int, path: Path, risk: str) -> bool:
    """Take a flock on `file`; whether nobody holds one that excludes it.

    A file system without flock is named in the log, once, with the `risk`; the lock then counts as
    taken.

    Args:
        kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        path: of the file.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.ENOLCK}:
            raise
        warn_once(f"the file system at {mount_of(path)} has no flock ({error.strerror}): {risk}")
    return True


def mount_of(path: Path) -> Path:
    """Return where the file system of `path` begins."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_mount())


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    logger.warning("%s", message)
