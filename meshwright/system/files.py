"""Writes, flushes and locks files, also if the file system can't flush or lock. No torch."""

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, TypeVar

from meshwright.system.errors import ConfigError, config_error
from meshwright.system.log import logger

T = TypeVar("T")

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
def whole_file(path: Path, *, is_flushed: bool = True) -> Iterator[BinaryIO]:
    """Give a file that takes the name `path` once it is whole, and on the disk if `is_flushed`.

    After an error inside, it is gone, and `path` as before. Until then it has a name that no other
    process has: of any machine, for containers have the same small numbers.
    """
    own = f"{_machine_digits()}-{secrets.token_hex(4)}.{os.getpid()}"
    unfinished = path.with_name(f"{path.name}.{own}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
            if is_flushed:
                file.flush()
                sync_file(file.fileno(), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


UNFINISHED = re.compile(r".*\.([0-9a-f]{8})-[0-9a-f]{8}\.([0-9]{1,9})\.unfinished")

DEAD_AFTER_S = 86_400
"""A file that another node hasn't written to for so long was left by a process that is gone."""


def remove_left_over(folder: Path) -> None:
    """Remove files that `whole_file` started in `folder`, and whose process is surely gone."""
    with TemporaryFile(dir=folder) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the clock of the file system
    for path in folder.glob("*.unfinished"):
        name = UNFINISHED.fullmatch(path.name)
        is_dead = bool(name and name[1] == _machine_digits() and not is_running(int(name[2])))
        try:
            if is_dead or now - path.stat().st_mtime > DEAD_AFTER_S:
                path.unlink()
        except OSError:  # it is finished, another process was faster, or it is another user's
            continue


def text_of(path: Path) -> str:
    """Return the text of a file, as far as it is UTF-8; "" if it can't be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


LFS_POINTER = re.compile(rb"version https://\S+/spec/v\d+\n(?:.*\n)*?oid sha256:[0-9a-f]{64}\n")

LFS_BYTES = 1024
"""A pointer is shorter. Source: docs/spec.md of Git LFS."""

LFS_RULE = "is a Git LFS pointer: the file that it stands for wasn't downloaded"

LFS_FIX = "run `git lfs install` and `git lfs pull` in its repository"


def is_lfs_pointer(path: Path | str) -> bool:
    """Return whether `git clone` left a pointer in the place of a file that Git LFS keeps. Raises
    `OSError` if it can't be read."""
    with Path(path).open("rb") as file:
        return LFS_POINTER.match(file.read(LFS_BYTES)) is not None


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" if it is gone, "?" if that can't
    be told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:  # as where too many files are open
        return "?"
    return text.rpartition(")")[2].split()[0]  # after the name, which may hold anything


def is_running(pid: int) -> bool:
    """Return whether a process of this number runs; not whether its parent has noticed its end."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return state_of(pid) not in ("", "Z", "X")


@cache
def this_machine() -> str:
    """Return words that are equal where process numbers mean the same, in one boot of a kernel and
    one namespace of them. "" where the system doesn't say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _machine_digits() -> str:
    """8 hexadecimal digits of this machine; random where the system doesn't say."""
    words = f"{socket.gethostname()} {this_machine()}" if this_machine() else secrets.token_hex(8)
    return f"{zlib.crc32(words.encode()):08x}"


@contextmanager
def only_warn(words: str, *facts: object) -> Iterator[None]:
    """Log an `OSError` inside, headed by `words`, and go on: a full disk ends no training."""
    try:
        yield
    except OSError as error:
        logger.warning(f"{words}: %s", *facts, error)


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
    """Return where the file system of `path` starts."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_mount())


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    logger.warning("%s", message)


@dataclass(frozen=True)
class NamedPath:
    """A path that a user gave, and its key: an error has both."""

    key: str
    path: Path

    def check(self, ok: bool, rule: str, fix: str = "") -> None:
        """Raise `ConfigError` unless `ok`."""
        if not ok:
            raise self.error(rule, fix)

    def error(self, rule: str, fix: str = "") -> ConfigError:
        """Return the error of a path that breaks `rule`."""
        return config_error(self.key, str(self.path), rule, fix)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file `name` of the folder."""
        try:
            self.check(not is_lfs_pointer(self.path / name), f"{name} {LFS_RULE}", LFS_FIX)
            content = json.loads((self.path / name).read_text("utf-8"))
        except ConfigError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.error(f"{name} cannot be read: {reason}") from None
        self.check(isinstance(content, dict), f"{name} holds no JSON object")
        return dict(content)
