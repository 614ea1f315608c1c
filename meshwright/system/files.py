"""Writes, flushes and locks files, also if the file system can't flush or lock. No torch."""

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, TypeVar

from meshwright.system.errors import ConfigError, StorageError, config_error, first_line
from meshwright.system.log import busy, logger

T = TypeVar("T")

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Errors by which a file system says that it lacks a call."""

RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each further attempt after a read error that may pass."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that are answers: there is no such file."""

LASTING = frozenset(
    {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
)
"""Numbers of errors that stay until a person does something; None: it has no number."""


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


CLIENTS = {"aiohttp", "fsspec", "http", "httpcore", "httpcore2", "httpx", "httpx2", "requests"}
CLIENTS |= {"urllib", "urllib3", "botocore", "aiobotocore", "gcsfs", "google"}
"""Modules whose errors are of a connection, unless they say otherwise. By name, because to import
them takes a tenth of the time to a command's first word."""

TRY_LATER = (408, 425, 429)
"""Answers of a server to a request that is right; those from 500 are others."""

OF_CONNECTIONS = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "ChecksumError"}
OF_CONNECTIONS |= {"CredentialRetrievalError", "MetadataRetrievalError", "TransportError"}
"""Classes of botocore's and google.auth's errors that may pass, the ones of a server that renews
credentials among them. Their others are of credentials and settings."""

CREDENTIALS_FIX = (
    "correct the credentials of the storage (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, or the role of this machine), or let them read it"
)


def may_pass(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is one of a network or a file system that may be gone
    later.

    `datasets` makes a `FileNotFoundError` of a hub that doesn't answer, and hides the cause.
    """
    passes: bool | None = None
    while error is not None:
        module = type(error).__module__
        if (status := _http_status(error)) is not None:
            return status >= 500 or status in TRY_LATER
        if _is_of_settings(error):
            return False
        if "OfflineModeIsEnabled" in repr(error):  # a variable of the user's
            return False
        is_of_network = module.partition(".")[0] in CLIENTS
        if is_of_network or isinstance(error, ConnectionError | TimeoutError):
            passes = True
        elif isinstance(error, OSError) and passes is None:
            # pyarrow's error of a damaged file is an OSError without a number
            is_answer = isinstance(error, (*ABSENT, PermissionError))
            passes = not is_answer and error.errno not in LASTING
        error = error.__cause__ or error.__context__
    return bool(passes)


def _http_status(error: BaseException) -> int | None:
    """Return a server's answer to the request that failed with `error`; None: there is none."""
    response = getattr(error, "response", error)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif type(error).__module__ == "urllib.error":
        status = getattr(error, "code", None)
    else:
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _is_of_settings(error: BaseException) -> bool:
    """Return whether a client has found no credentials, or rejects its own settings."""
    is_of_client = type(error).__module__.startswith(("botocore", "google.auth"))
    return is_of_client and not OF_CONNECTIONS & {base.__name__ for base in type(error).__mro__}


def _is_denied(error: BaseException | None) -> bool:
    """Return whether a storage rejects this user's credentials, or its client has none."""
    while error is not None:
        if _http_status(error) in (400, 401, 403) or _is_of_settings(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_patiently(path: Path | str, read: Callable[[], T]) -> T:
    """Return `read()`, which reads `path`; call it again after growing waits if that fails.

    A server that restarts or a stale handle says nothing about a file's content. A permission is
    not waited for, since it takes a person to give it. An error that doesn't pass is raised.

    Raises:
        StorageError: if the errors stay.
        ConfigError: if this user may not read it.
    """
    is_address = "://" in str(path)
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            # a client of object storage may wait and try again by itself
            with busy(f"reading {path}") if is_address else nullcontext():
                return read()
        except (*ABSENT, ConfigError):
            raise
        except PermissionError as error:
            what = f"{path} cannot be read: {error.strerror or error}"
            fix = CREDENTIALS_FIX if is_address else "let this user read it"
            raise ConfigError("", f"{what}\n  fix: {fix}") from error
        except Exception as error:  # whatever a client of a storage raises
            if is_address and not may_pass(error) and _is_denied(error):
                what = f"{path} cannot be read: {first_line(error)}"
                raise ConfigError("", f"{what}\n  fix: {CREDENTIALS_FIX}") from error
            if not may_pass(error) or getattr(error, "has_waited", False):
                raise
            reason = getattr(error, "strerror", None) or first_line(error)
            what = f"{path} cannot be read: {reason}"
            if wait_s is None:
                fix = "run the same command again when the storage answers"
                failed = StorageError(f"{what}\n  fix: {fix}")
                failed.has_waited = True
                raise failed from error
            logger.warning("%s; trying again in %g s", what, wait_s)
            time.sleep(wait_s)
    raise AssertionError


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
