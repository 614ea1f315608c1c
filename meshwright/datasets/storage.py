"""Bytes of files by ranges, on a file system or in object storage.

Nothing is mapped, and nothing is read whole. Web servers are asked by Python itself, since each of
their answers says which content it is of; other storage by fsspec.
"""

import io
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, TypeVar

from meshwright.config.section import ADDRESS
from meshwright.system.errors import ConfigError, StorageError, first_line
from meshwright.system.files import ABSENT, read_patiently, whole_file

T = TypeVar("T")

DESCRIPTORS = 64
"""Local files that a process keeps open at most; it may usually have 1024 descriptors."""

TIMEOUT_S = 60.0
"""After so long without a byte, a request to a server has failed."""

AT_ONCE, AHEAD = 16, 8 << 20
"""Requests that look at many files; bytes that a stream reads with one request."""


class ChangedError(OSError):
    """A file isn't the one that it was when the job first looked at it."""


class UnsupportedError(OSError):
    """A file is good, but made in a way that can't be read here."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class DataFile:
    """A file as it was when the job looked for it."""

    path: str
    """Or an address."""
    size: int = -1
    """Bytes; -1: unknown, of a file on the hub."""
    stamp: str = ""
    """Another one, if the content has changed: of a local file, the time of its last change in
    nanoseconds. "": the storage doesn't say."""


def is_address(path: str) -> bool:
    """Return whether it is one of object storage, not a path."""
    return ADDRESS.match(path) is not None


def stat(path: str) -> DataFile:
    """Look at one file.

    Raises:
        FileNotFoundError: if there is none.
        StorageError: if the storage doesn't answer.
        ConfigError: if it may not be read, or a package is missing.
    """
    if not is_address(path):
        state = os.stat(path)
        return DataFile(path, state.st_size, str(state.st_mtime_ns))
    return _patiently(path, lambda: _look(path))


def stat_all(paths: Sequence[str]) -> list[DataFile]:
    """Look at many files, those of object storage by many requests at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(stat, paths))


def find_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files that an address stands for: itself, the ones below it that end in one of
    `suffixes`, or its glob. A name below it that starts with "." or "_" is left out.

    Raises:
        ConfigError: if files can't be listed there.
    """
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        if not address.endswith(suffixes):
            fix = f"name one file, which ends in {' or '.join(suffixes)}"
            raise ConfigError("", f"{address}: a web server does not list files\n  fix: {fix}")
        return [address]
    files, is_glob = _file_system(address), "*" in address or "?" in address
    listed = _patiently(address, lambda: list((files.glob if is_glob else files.find)(address)))
    names = sorted(name if "://" in name else f"{scheme}://{name.lstrip('/')}" for name in listed)
    if names == [address] or is_glob:
        return names
    return [
        name
        for name in names
        if name.endswith(suffixes)
        and not any(part[0] in "._" for part in name[len(address) :].strip("/").split("/"))
    ]


class RangeFile:
    """One file, of which any bytes can be read. Local ones share `DESCRIPTORS` descriptors.

    Args:
        stamp: of the content that is wanted; "": the content at the first read.
        cache: of blocks of object storage, if they are kept.
    """

    _numbers = itertools.count()

    def __init__(self, path: str, stamp: str = "", cache: "BlockCache | None" = None) -> None:
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
        return _patiently(self.path, lambda: read(begin, size))

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
            content, remote = _ask(self.path, begin, size)
            self._compare(remote.stamp)
            if len(content) != max(min(size, remote.size - begin), 0):
                raise ConnectionError(f"{len(content)} of {size} bytes came")
            return content
        if not self._is_known:  # fsspec doesn't say which content an answer is of
            self._compare(_look(self.path).stamp)
            self._is_known = True
        files = _file_system(self.path)
        return bytes(files.cat_file(self.path, start=begin, end=begin + size))

    def _compare(self, stamp: str) -> None:
        self.stamp = self.stamp or stamp
        if stamp != self.stamp:
            raise ChangedError(f"{self.path}: has changed since the job looked at it first")


class BlockCache:
    """Blocks of files in object storage, in a folder that all processes of a machine share. Beyond
    `limit` bytes, the blocks that were written first are deleted."""

    BLOCK = 1 << 18

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        self._written, self._guard = limit, threading.Lock()  # the first write looks at all

    def read(self, file: RangeFile, begin: int, size: int) -> bytes:
        """Return bytes of `file`, as `RangeFile.read`."""
        content = b"".join(self._block(file, block) for block in self._blocks(begin, size))
        return content[begin % self.BLOCK :][:size]

    def forget(self, file: RangeFile, begin: int, size: int) -> None:
        """Delete the blocks that hold these bytes."""
        for block in self._blocks(begin, size):
            self._delete(self._place(file, block))

    def _blocks(self, begin: int, size: int) -> range:
        return range(begin // self.BLOCK, (begin + size - 1) // self.BLOCK + 1)

    def _place(self, file: RangeFile, block: int) -> Path:
        name = blake2b(f"{file.path}\n{file.stamp}".encode(), digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}-{block}"

    def _block(self, file: RangeFile, block: int) -> bytes:
        path = self._place(file, block)
        try:
            return path.read_bytes()
        except OSError:
            content = file.fetch(block * self.BLOCK, self.BLOCK)
        with suppress(OSError):  # no room: it is read again from its storage
            path.parent.mkdir(parents=True, exist_ok=True)
            # not flushed: its checksum is compared at every read
            with whole_file(path, is_flushed=False) as own:
                own.write(content)
        with self._guard:
            self._written += len(content)
            if self._written >= self._limit // 16:
                self._written = 0
                self._shrink()
        return content

    def _shrink(self) -> None:
        """Delete the oldest blocks until a sixteenth of the limit is free."""
        blocks = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process deleted it
                state = path.stat()
                blocks.append((state.st_mtime_ns, state.st_size, path))
        size = sum(size for _, size, _ in blocks)
        for _, of_one, path in sorted(blocks):
            if size <= self._limit * 15 // 16:
                return
            self._delete(path)
            size -= of_one

    @staticmethod
    def _delete(path: Path) -> None:
        with suppress(OSError):  # it is gone, or another user's
            path.unlink()


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


def _file_system(address: str) -> Any:
    """Return the fsspec file system of an address; fsspec keeps one of each."""
    import fsspec  # type: ignore[import-untyped]  # here: local files need none

    scheme = address.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        what = f"{scheme}:// needs a package that is not installed\n  fix: {error}"
        raise ConfigError("", what) from error
    except (ValueError, TypeError) as error:  # TypeError: as ftp, which wants more than addresses
        fix = "use s3://, gs://, hf:// or https://, or mount it and name the path"
        what = f"{scheme}:// is no storage that fsspec opens by an address"
        raise ConfigError("", f"{what}\n  fix: {fix}") from error


STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "checksum",
    "LastModified",
    "last_modified",
    "mtime",
)
"""Fields of fsspec's descriptions that a change of the content changes, the surest first."""


def _look(address: str) -> DataFile:
    if address.startswith(("http://", "https://")):
        return _ask(address, 0, 1)[1]
    files = _file_system(address)
    files.invalidate_cache()
    info = files.info(address)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{address} is a folder")
    stamp = next((f"{name} {info[name]}" for name in STAMPS if info.get(name)), "")
    return DataFile(address, int(info["size"]), stamp)


CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


def _ask(address: str, begin: int, size: int) -> tuple[bytes, DataFile]:
    """Return the bytes of a range that a web server gives, and the whole content as it says.

    Source: RFC 9110, sections 14 (ranges) and 8.8 (validators).
    """
    # not at the top: with ssl they take a tenth of the time to a command's first word
    import urllib.error
    import urllib.parse
    import urllib.request

    headers = {"Range": f"bytes={begin}-{begin + size - 1}", "Accept-Encoding": "identity"}
    # spaces and umlauts as browsers send them; what is written so already stays
    url = urllib.parse.quote(address, safe="%/:?#[]@!$&'()*+,;=~|")
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise FileNotFoundError(f"{address}: the server has no such file") from error
        if error.code in (401, 403):
            raise PermissionError(f"the server answers {error.code} {error.reason}") from error
        if error.code != 416:  # nothing is that far behind
            raise
        answer = error
    with answer:
        said = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if answer.status not in (206, 416) or said is None or int(said[1] or begin) != begin:
            what = f"{address}: its server gives no ranges of bytes"
            raise ConfigError("", f"{what}\n  fix: download the file")
        stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        content = answer.read() if answer.status == 206 else b""
        return content, DataFile(address, int(said[3]), str(stamp))


def _patiently(path: str, read: Callable[[], T]) -> T:
    """Return `read()`; call it again after growing waits if its error may pass."""
    try:
        return read_patiently(path, read)
    except (ConfigError, StorageError, ChangedError, *ABSENT):
        raise
    except Exception as error:  # whatever a client of a storage raises
        raise ConfigError("", f"{path} cannot be read: {first_line(error)}") from error
