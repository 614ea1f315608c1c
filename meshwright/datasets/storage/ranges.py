"""Bytes of files by ranges, on a file system or in object storage.

Nothing is mapped, and nothing is read whole.
"""

import errno
import http.client
import io
import itertools
import mmap
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import IO, Any, TypeVar

from meshwright.config.section import ADDRESS
from meshwright.datasets.storage import remote
from meshwright.datasets.storage.block_cache import BlockCache
from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import RETRY_AFTER_S
from meshwright.system.log import logger

T = TypeVar("T")


DESCRIPTORS = 64
"""Local files that a process keeps open at most; it may usually have 1024 descriptors."""


TIMEOUT_S = 60.0
"""After so long without a byte, a request to a server has failed."""


AT_ONCE = 16
"""Requests that look at many files."""


AHEAD = 8 << 20
"""Bytes that a stream reads with one request."""


PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers of a server that another attempt may not get."""


STAYING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors that are answers."""


class ChangedError(ConfigError):
    """A file is not the one that it was when the job first looked at it."""


@dataclass(frozen=True)
class Stat:
    """A file as its storage describes it."""

    size: int
    """Bytes."""
    stamp: str
    """Another one, if the content has changed; "": the storage does not say."""

    @property
    def changed(self) -> int:
        """A number in place of the stamp: of a local file, the time of its change."""
        if self.stamp.isdecimal():
            return int(self.stamp)
        return int.from_bytes(blake2b(self.stamp.encode(), digest_size=6).digest(), "big")


def is_address(path: str) -> bool:
    """Return whether it is one of object storage, not a path."""
    return ADDRESS.match(path) is not None


def stat(path: str) -> Stat:
    """Look at one file.

    Raises:
        FileNotFoundError: if there is none.
        StorageError: if the storage does not answer.
        ConfigError: if it may not be read, or a package is missing.
    """
    if not is_address(path):
        found = os.stat(path)
        return Stat(found.st_size, str(found.st_mtime_ns))
    return _patiently(path, lambda: Stat(*remote.look(path, TIMEOUT_S)))


def stat_all(paths: Sequence[str]) -> list[Stat]:
    """Look at many files, those of object storage by many requests at once."""
    if not any(map(is_address, paths)):
        return list(map(stat, paths))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(stat, paths))


def find_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files that an address stands for: itself, those below it that end in one of
    `suffixes`, or its glob. A name below it that begins with "." or "_" is left out.

    Raises:
        ConfigError: if files cannot be listed there.
    """
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        if not address.endswith(suffixes):
            fix = f"name one file, which ends in {' or '.join(suffixes)}"
            raise ConfigError("", f"{address}: a web server does not list files\n  fix: {fix}")
        return [address]
    files = remote.file_system(address)

    def look() -> list[str]:
        if "*" in address or "?" in address:
            return list(files.glob(address))
        return list(files.find(address))

    found = _patiently(address, look)
    names = [name if "://" in name else f"{scheme}://{name.lstrip('/')}" for name in found]
    if names == [address] or "*" in address or "?" in address:
        return sorted(names)
    inside = [name[len(address) :].strip("/").split("/") for name in names]
    return sorted(
        name
        for name, parts in zip(names, inside, strict=True)
        if name.endswith(suffixes) and not any(part.startswith((".", "_")) for part in parts)
    )


class RangeFile:
    """One file, of which any bytes can be read.

    A local one takes one of `DESCRIPTORS` descriptors, which all such files share.

    Args:
        stamp: of the content that is wanted; "": the content at the first read.
        cache: keeps what is read of object storage; None: nothing is kept.
    """

    _numbers = itertools.count()

    def __init__(self, path: str, stamp: str = "", cache: BlockCache | None = None) -> None:
        self.path, self.stamp, self._cache = path, stamp, cache
        self.is_local = not is_address(path)
        self._number, self._is_known = next(self._numbers), False

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on; fewer only at the end of the file.

        Raises:
            ChangedError: if the storage says that the content is another by now.
            StorageError: if they cannot be read, also not after some time.
            OSError: as `stat`.
        """
        if size <= 0:
            return b""
        if self._cache is not None and not self.is_local:
            return self._cache.read(self, self.stamp, begin, size)
        return self.fetch(begin, size)

    def read_again(self, begin: int, size: int) -> bytes:
        """Read from where the file lies: not from a cache, nor from the system's memory."""
        if self.is_local:
            return _patiently(self.path, lambda: _read_from_disk(self.path, begin, size))
        if self._cache is not None:
            self._cache.forget(self, self.stamp, begin, size)
        return self.fetch(begin, size)

    def fetch(self, begin: int, size: int) -> bytes:
        """Read without a cache."""
        if self.is_local:
            return _patiently(self.path, lambda: self._read_local(begin, size))
        return _patiently(self.path, lambda: self._request(begin, size))

    def _read_local(self, begin: int, size: int) -> bytes:
        held = _descriptor(self.path, self._number)
        content = os.pread(held.number, size, begin)
        while 0 < len(content) < size:  # one call gives 2 GiB at most
            more = os.pread(held.number, size - len(content), begin + len(content))
            if not more:
                break
            content += more
        return content

    def _request(self, begin: int, size: int) -> bytes:
        if self.path.startswith(("http://", "https://")):
            content, stamp = remote.get(self.path, begin, size, TIMEOUT_S)
            self.stamp = self.stamp or stamp
            if stamp != self.stamp:
                raise changed(self.path)
            return content
        if not self._is_known:  # fsspec does not say which content an answer is of
            _, found = remote.look(self.path, TIMEOUT_S)
            if self.stamp not in ("", found):
                raise changed(self.path)
            self.stamp, self._is_known = found, True
        return bytes(
            remote.file_system(self.path).cat_file(self.path, start=begin, end=begin + size)
        )


def open_stream(path: str, begin: int = 0) -> IO[bytes]:
    """Open a file for reading from `begin` on; it can be sought in.

    Raises:
        OSError: as `stat`; and reads as `RangeFile.read`.
    """
    if not is_address(path):
        local = open(path, "rb")  # noqa: SIM115
        local.seek(begin)
        return local
    stream: IO[bytes] = io.BufferedReader(_RemoteStream(path), AHEAD)
    stream.seek(begin)
    return stream


class _RemoteStream(io.RawIOBase):
    def __init__(self, path: str) -> None:
        found = stat(path)
        self._file, self._size, self._at = RangeFile(path, found.stamp), found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size <= 0:
            return 0
        content = self._file.read(self._at, size)
        if len(content) < size:
            raise changed(self._file.path)
        buffer[:size] = content
        self._at += size
        if self._at == self._size and stat(self._file.path).stamp != self._file.stamp:
            raise changed(self._file.path)
        return size


def changed(path: str) -> ChangedError:
    """Return the error of a file that has changed under the job."""
    fix = "restore it, or start again to take it as it is now"
    return ChangedError("", f"{path}: has changed since the job looked at it first\n  fix: {fix}")


PAGE = 1 << 12


def _read_from_disk(path: str, begin: int, size: int) -> bytes:
    first = begin // PAGE * PAGE
    aligned = mmap.mmap(-1, -(-(begin + size - first) // PAGE) * PAGE)
    with suppress(OSError):  # not every file system has it
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            num_read = os.preadv(descriptor, [aligned], first)
            return aligned[begin - first : min(begin - first + size, num_read)]
        finally:
            os.close(descriptor)
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(size)


class _Descriptor:
    """Of a local file; it is closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        try:
            self.number = os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            _descriptor.cache_clear()  # this process may have fewer
            self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(DESCRIPTORS)
def _descriptor(path: str, of: int) -> _Descriptor:
    return _Descriptor(path)


def _patiently(path: str, read: Callable[[], T]) -> T:
    """Return `read()`; call it again after growing waits if its error may pass."""
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            return read()
        except (*STAYING, ConfigError):
            raise
        except PermissionError as error:
            fix = "let this user, or these credentials, read it"
            raise ConfigError("", f"{path} cannot be read: {error}\n  fix: {fix}") from error
        except Exception as error:  # whatever a client of a storage raises
            if not _may_pass(error):
                raise ConfigError("", f"{path} cannot be read: {_words(error)}") from error
            _descriptor.cache_clear()  # of a stale handle, another is to be had
            if wait_s is None:
                fix = "run the same command again when the storage answers"
                what = f"{path} cannot be read: {_words(error)}"
                raise StorageError(f"{what}\n  fix: {fix}") from error
            logger.warning("%s: %s; trying again in %g s", path, _words(error), wait_s)
            time.sleep(wait_s)
    raise AssertionError


CLIENTS = {
    "aiohttp",
    "botocore",
    "aiobotocore",
    "gcsfs",
    "google",
    "httpx2",
    "httpcore2",
    "requests",
}
"""Modules whose errors are of a connection, unless they say otherwise."""


def _may_pass(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, urllib.error.HTTPError):
            return error.code in PASSING
        is_of_client = type(error).__module__.partition(".")[0] in CLIENTS
        if is_of_client or isinstance(error, (OSError, http.client.HTTPException)):
            return True
        error = error.__cause__
    return False


def _words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
