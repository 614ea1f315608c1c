"""Bytes of files by ranges: nothing is mapped, and nothing is read whole."""

import io
import itertools
import os
from functools import lru_cache
from typing import IO, Any, Protocol

from meshwright.datasets.data_file import ChangedError, DataFile, is_address, read_or_say_why
from meshwright.datasets.storage import ask, file_system, look, stat

DESCRIPTORS = 64
"""Local files that a process keeps open at most; it may usually have 1024 descriptors."""

AHEAD = 8 << 20
"""Bytes that a stream of object storage reads with one request."""


class RangeCache(Protocol):
    """Keeps bytes of files of object storage."""

    def read(self, file: "RangeFile", begin: int, size: int) -> bytes: ...

    def forget(self, file: "RangeFile", begin: int, size: int) -> None: ...


class RangeFile:
    """One file, of which any bytes can be read. Local ones share `DESCRIPTORS` descriptors.

    Args:
        stamp: of the content that is wanted; "": the content at the first read.
        cache: of blocks of object storage, if they are kept.
    """

    _numbers = itertools.count()

    def __init__(self, path: str, stamp: str = "", cache: "RangeCache | None" = None) -> None:
        self.path, self.stamp, self._cache = path, stamp, cache
        self.is_local = not is_address(path)
        self._number, self._is_known = next(self._numbers), False

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on; fewer only at the end of the file.

        Raises:
            ChangedError: if the storage says that the content has changed.
            StorageError: if they can't be read, also not after some time.
            OSError: as `stat`.
        """
        if size <= 0:
            return b""
        if self._cache is not None and not self.is_local:
            return self._cache.read(self, begin, size)
        return self.fetch(begin, size)

    def read_again(self, begin: int, size: int) -> bytes:
        """Read from where the file lies: not from a cache, nor from the system's memory."""
        if self.is_local:
            descriptor = _open(self.path, self._number).fileno()
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)
        elif self._cache is not None:
            self._cache.forget(self, begin, size)
        return self.fetch(begin, size)

    def fetch(self, begin: int, size: int) -> bytes:
        """Read without a cache."""
        read = self._read_local if self.is_local else self._request
        return read_or_say_why(self.path, lambda: read(begin, size))

    def _read_local(self, begin: int, size: int) -> bytes:
        parts = list[bytes]()
        try:
            file = _open(self.path, self._number)
            while size and (part := os.pread(file.fileno(), size, begin)):  # of 2 GiB at most
                parts.append(part)
                begin, size = begin + len(part), size - len(part)
        except OSError:  # of a stale handle, a new one can be had; or there were too many
            _open.cache_clear()
            raise
        return b"".join(parts)

    def _request(self, begin: int, size: int) -> bytes:
        if self.path.startswith(("http://", "https://")):
            content, remote = ask(self.path, begin, size)
            self._compare(remote.stamp)
            if len(content) != max(min(size, remote.size - begin), 0):
                raise ConnectionError(f"{len(content)} of {size} bytes came")
            return content
        if not self._is_known:  # fsspec doesn't say which content an answer is of
            self._compare(look(self.path).stamp)
            self._is_known = True
        files = file_system(self.path)
        return bytes(files.cat_file(self.path, start=begin, end=begin + size))

    def _compare(self, stamp: str) -> None:
        self.stamp = self.stamp or stamp
        if stamp != self.stamp:
            raise ChangedError(f"{self.path}: has changed since the job looked at it first")


def open_file(file: DataFile) -> IO[bytes]:
    """Open a file for reading and seeking.

    Raises:
        ChangedError: if it is gone, or differs from when the job looked for it.
        OSError: if it can't be read now. Of object storage, as `stat` and `RangeFile.read`.
    """
    path = file.path
    if is_address(path):
        if stat(path) != file:
            raise ChangedError(f"{path}: has changed since the job started")
        return io.BufferedReader(_RemoteStream(file), AHEAD)
    try:
        opened = open(path, "rb")  # noqa: SIM115  the caller closes it
    except FileNotFoundError as error:
        raise ChangedError(f"{path}: has gone since the job started") from error
    size = os.fstat(opened.fileno()).st_size
    if size != file.size:
        opened.close()
        raise ChangedError(f"{path}: had {file.size} bytes at the start, and has {size} now")
    return opened


class _RemoteStream(io.RawIOBase):
    def __init__(self, file: DataFile) -> None:
        self._file, self._size, self._at = RangeFile(file.path, file.stamp), file.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(self._at, min(len(buffer), self._size - self._at))
        buffer[: len(content)] = content
        self._at += len(content)
        if self._at >= self._size or not content:  # the end, or earlier than it was
            self._file._compare(stat(self._file.path).stamp)
        return len(content)


@lru_cache(DESCRIPTORS)
def _open(path: str, of: int) -> IO[bytes]:
    """A local file of the `RangeFile` of that number; it is closed with the last reference."""
    return open(path, "rb", buffering=0)


def close_files() -> None:
    """Close the local files that this process keeps open; a read opens its file again."""
    _open.cache_clear()
