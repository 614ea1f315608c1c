"""Tokens in files: written once, mapped into memory by every rank that reads them.

A cache is a folder. Of each part, which one process wrote: `00000.tokens`, the ids of its documents
one after the other, uint16 or uint32; and `00000.npz`, the lengths of the documents and checksums.
Of the whole: `lengths`, uint32; and `cache.npz`, which is there only if all else is. Where the
tokens are files of others, `sources.json` has the path of each part's, and the byte it begins at.
"""

import ctypes
import errno
import functools
import json
import mmap
import os
import weakref
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.system.errors import ConfigError
from meshwright.system.files import warn_once, whole_file

_C = ctypes.CDLL(None, use_errno=True)


_C.mmap.restype = ctypes.c_void_p


_C.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]


_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map a whole file as a read-only array, for as long as a view of it lives.

    `numpy.memmap` and `mmap.mmap` keep a descriptor for each file, and a process may have 1024: a
    mixture has thousands of files. The operating system needs none once the file is mapped. From
    Python 3.13 on, `mmap.mmap(..., trackfd=False)` says the same.

    Raises:
        OSError: if the file cannot be opened or mapped.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.empty(0, dtype)
        address = _C.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    content = (ctypes.c_ubyte * size).from_address(address)
    # not when the interpreter ends: a thread may still be reading
    weakref.finalize(content, _C.munmap, address, size).atexit = False
    array = np.frombuffer(memoryview(content), dtype)
    array.flags.writeable = False
    return array


BLOCK_BYTES = 1 << 16
"""Tokens are checked in blocks of this many bytes."""


PAGE = 1 << 12


BLOCK_DOCUMENTS = 1 << 10
"""Lengths of documents are checked, and documents shuffled, in blocks of this many."""


OF_PART = ("lengths", "token_checksums", "num_bytes")
"""Arrays that are kept of each part,"""


OF_CACHE = (
    *("content", "num_bytes", "num_documents", "dtype"),
    *("part_starts", "block_starts", "length_checksums"),
)
"""and of the whole."""


CACHE_KEY = "training.token_cache_folder"


SOURCES = "sources.json"


LENGTHS = "lengths"


DAMAGED = "damaged"
"""Notes of readers, a line each: numbers of parts, or `LENGTHS`, whose content is wrong. The next
job looks into them; others may be reading the files meanwhile."""


Lengths = npt.NDArray[np.uint32]


Starts = npt.NDArray[np.int64]


class DamagedCacheError(Exception):
    """A file of a cache is not as it was written."""


@dataclass(frozen=True)
class Part:
    """One part on disk."""

    folder: Path
    number: int
    source: Path | None = None
    """File of others that holds its tokens,"""
    offset: int = 0
    """from this byte on."""

    @property
    def tokens(self) -> Path:
        return self.source or self.folder / f"{self.number:05}.tokens"

    @property
    def index(self) -> Path:
        """Written after `tokens`: if it is there, the part is complete."""
        return self.folder / f"{self.number:05}.npz"


def checksums(
    path: Path, block_bytes: int = BLOCK_BYTES, *, offset: int = 0
) -> npt.NDArray[np.uint32]:
    """CRC-32 of each block of the file from `offset` on."""
    with open(path, "rb") as file:
        file.seek(offset)
        blocks = iter(lambda: file.read(block_bytes), b"")
        return np.array([zlib.crc32(block) for block in blocks], np.uint32)


def save_sources(folder: Path, parts: Sequence[Part]) -> None:
    """Note where the tokens of `parts` are."""
    sources = [{"path": str(part.source), "offset": part.offset} for part in parts]
    with whole_file(folder / SOURCES) as file:
        file.write(json.dumps(sources).encode())


def _parts(folder: Path, count: int) -> list[Part]:
    """Return the parts of a cache.

    Raises:
        DamagedCacheError: if it is not known where their tokens are.
    """
    if not (folder / SOURCES).exists():
        return [Part(folder, number) for number in range(count)]
    try:
        sources = json.loads((folder / SOURCES).read_text("utf-8"))
        found = [(Path(source["path"]), int(source["offset"])) for source in sources]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCacheError(f"{SOURCES}: {error}") from error
    if len(found) != count:
        raise DamagedCacheError(f"{SOURCES} has {len(found)} of {count} parts")
    return [Part(folder, number, *place) for number, place in enumerate(found)]


def read_notes(folder: Path) -> set[str]:
    """Return the content of `DAMAGED`."""
    try:
        return set((folder / DAMAGED).read_text("utf-8").split())
    except FileNotFoundError:
        return set()


def changed_source(part: Part, what: str) -> ConfigError:
    """Return the error of a file of others that is not as it was: only its owner knows why."""
    fix = f"restore it, or delete {part.folder} to accept it as it is"
    message = f"{part.tokens}: has changed since it was indexed: {what}"
    return ConfigError(CACHE_KEY, f"{message}\n  fix: {fix}")


def read_again(path: Path, begin: int, size: int) -> bytes:
    """Read bytes of a file from the disk, not from the system's memory, where that can be."""
    first = begin // PAGE * PAGE
    aligned = mmap.mmap(-1, -(-(begin + size - first) // PAGE) * PAGE)
    with suppress(OSError):  # not every file system has it
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(descriptor, [aligned], first)
            return aligned[begin - first : begin - first + size]
        finally:
            os.close(descriptor)
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(size)


def load_arrays(path: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays `names` of an .npz, whose format has checksums of its own.

    Raises:
        DamagedCacheError: if it is not whole, or is not there.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except Exception as error:  # zipfile and numpy raise a dozen kinds over a flipped bit
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL, None):
            raise  # it was not read
        raise DamagedCacheError(f"{path.name}: {error}") from error


class TokenCache:
    """A complete cache, read as one array of tokens.

    The first read of a block verifies its checksum, so that no token is ever wrong.

    Args:
        folder: of the cache.

    Raises:
        DamagedCacheError: if it is not complete: a file is missing, or has not the size it had.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        arrays = load_arrays(folder / "cache.npz", OF_CACHE)
        self.content = str(arrays["content"])
        """Hash: equal where all tokens of all documents are."""
        self.num_bytes = int(arrays["num_bytes"])
        """Of the text, in UTF-8."""
        self.block_starts: Starts = arrays["block_starts"].astype(np.int64)
        """(blocks + 1,) first token of each block of documents."""
        self._length_checksums = arrays["length_checksums"]
        self._part_starts = arrays["part_starts"].astype(np.int64)
        self.num_tokens = int(self.block_starts[-1])
        self.num_documents = int(arrays["num_documents"])
        self._dtype = np.dtype(str(arrays["dtype"]))
        self._parts = _parts(folder, len(self._part_starts) - 1)
        sizes = np.diff(self._part_starts) * self._dtype.itemsize
        for part, size in zip(self._parts, sizes.tolist(), strict=True):
            _check_size(part.tokens, part.offset + size)
        _check_size(folder / LENGTHS, 4 * self.num_documents)
        self._tokens = functools.cache(self._map_tokens)
        self._lengths: Lengths = map_file(folder / LENGTHS, np.uint32)

    def lengths(self, block: int) -> Lengths:
        """Tokens of each document in a block, in the order in which they lie."""
        begin = block * BLOCK_DOCUMENTS
        lengths = np.array(self._lengths[begin : begin + BLOCK_DOCUMENTS])
        expected = self._length_checksums[block]
        if zlib.crc32(lengths.data) != expected:
            path = self.folder / LENGTHS
            content = self._read_again(path, 4 * begin, lengths.nbytes, expected)
            if content is None:
                raise self._damage(LENGTHS, f"{path}: damaged")
            return np.frombuffer(content, np.uint32)
        return lengths

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens `begin` to `end`, which lie in one document: a view of the file."""
        number = int(self._part_starts.searchsorted(begin, side="right")) - 1
        tokens, is_checked, expected = self._tokens(number)
        first = int(self._part_starts[number])
        begin, end = begin - first, end - first
        width = BLOCK_BYTES // self._dtype.itemsize
        blocks = range(begin // width, (end - 1) // width + 1)
        other: dict[int, bytes] = {}
        for block in blocks:
            if not is_checked[block]:
                content = tokens[block * width : (block + 1) * width]
                is_checked[block] = zlib.crc32(content.data) == expected[block]
                if not is_checked[block]:
                    other[block] = self._from_disk(number, block, content.nbytes, expected[block])
        if not other:
            return tokens[begin:end]
        whole = [other.get(b) or tokens[b * width : (b + 1) * width].tobytes() for b in blocks]
        first = blocks[0] * width
        return np.frombuffer(b"".join(whole), self._dtype)[begin - first : end - first]

    def _from_disk(self, number: int, block: int, size: int, expected: object) -> bytes:
        """Return a block whose content in memory is wrong.

        Raises:
            ConfigError: if it is so on the disk.
        """
        part, place = self._parts[number], block * BLOCK_BYTES
        content = self._read_again(part.tokens, part.offset + place, size, expected)
        if content is not None:
            return content
        if part.source is not None:
            raise changed_source(part, f"byte {part.offset + place} or one after it")
        raise self._damage(str(number), f"{part.tokens}: damaged at byte {place}")

    def _read_again(self, path: Path, begin: int, size: int, expected: object) -> bytes | None:
        """Return bytes whose checksum was wrong as they are on the disk; None if it is so there."""
        content = read_again(path, begin, size)
        if zlib.crc32(content) != expected:
            return None
        where = f"bytes {begin} to {begin + size}"
        warn_once(f"{path}: {where} were wrong in memory, and are right on the disk")
        return content

    def _map_tokens(
        self, number: int
    ) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.bool_], npt.NDArray[np.generic]]:
        """Return a part's tokens, which of its blocks have been checked, and all checksums."""
        part = self._parts[number]
        try:
            expected = load_arrays(part.index, OF_PART)["token_checksums"]
        except DamagedCacheError as error:
            raise self._damage(str(number), f"{part.index}: damaged: {error}") from error
        tokens = map_file(part.tokens, np.uint8)[part.offset :].view(self._dtype)
        return tokens, np.zeros(len(expected), np.bool_), expected

    def _damage(self, which: str, what: str) -> ConfigError:
        """Note damage for the next job; other jobs may still read the files that are there."""
        try:
            with open(self.folder / DAMAGED, "a") as file:
                file.write(f"{which}\n")
        except OSError as error:
            fix = f"delete {self.folder} ({error.strerror}), or set {CACHE_KEY} to another folder"
        else:
            fix = "run the same command again: it checks this part, and repairs it"
        return ConfigError(CACHE_KEY, f"{what}\n  fix: {fix}")


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise DamagedCacheError(
            f"{path.name} is missing" if found is None else f"{path.name} has {found} of {size} B"
        )
