"""Tokens in files: written once, read by ranges by every rank.

A cache is a folder. Of each part, which one process wrote: `00000.tokens`, the ids of its documents
one after the other, uint16 or uint32; and `00000.npz`, the lengths of the documents and checksums.
Of the whole: `lengths`, uint32; and `cache.npz`, which is there only if all else is. Where the
tokens are files of others, it has the path or address of each part's, the byte it begins at, and
the stamp of its content in object storage.
"""

import errno
import functools
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.datasets.storage import BlockCache, ChangedError, RangeFile, is_address
from meshwright.system.errors import ConfigError
from meshwright.system.files import warn_once

BLOCK_BYTES = 1 << 16
"""Tokens are checked in blocks of this many bytes."""

BLOCK_DOCUMENTS = 1 << 10
"""Lengths of documents are checked, and documents shuffled, in blocks of this many."""

OF_PART = (
    *("lengths", "token_checksums", "num_bytes", "dtype", "offset", "stamp"),
    *("num_bad", "bad"),
)
"""Arrays that are kept of each part,"""

OF_CACHE = (
    *("content", "num_bytes", "num_documents", "dtype"),
    *("part_starts", "block_starts", "length_checksums"),
    *("sources", "offsets", "stamps", "num_bad", "first_bad"),
)
"""and of the whole."""

CACHE_KEY = "training.token_cache_folder"

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
    source: str = ""
    """File of others, or its address, that holds its tokens,"""
    offset: int = 0
    """from this byte on."""
    stamp: str = ""
    """Of its content in object storage."""

    @property
    def own(self) -> Path:
        """File of tokens in the folder."""
        return self.folder / f"{self.number:05}.tokens"

    @property
    def tokens(self) -> str:
        """Path or address of the file that holds its tokens."""
        return self.source or str(self.own)

    @property
    def index(self) -> Path:
        """Written after `tokens`: if it is there, the part is complete."""
        return self.folder / f"{self.number:05}.npz"


def changed_source(part: Part, what: str) -> ConfigError:
    """Return the error of a file of others that is not as it was: only its owner knows why."""
    fix = f"restore it, or delete {part.folder} to accept it as it is"
    message = f"{part.tokens}: has changed since it was indexed: {what}"
    return ConfigError(CACHE_KEY, f"{message}\n  fix: {fix}")


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
        looks_at_parts: also look whether every file of tokens has its size. Where another process
            of the job has done so, reading finds a file that is cut short.
        blocks: of tokens that lie in object storage.

    Raises:
        DamagedCacheError: if it is not complete: a file is missing, or has not the size it had.
    """

    def __init__(
        self, folder: Path, *, looks_at_parts: bool = True, blocks: BlockCache | None = None
    ) -> None:
        self.folder = folder
        arrays = load_arrays(folder / "cache.npz", OF_CACHE)
        self.content = str(arrays["content"])
        """Hash: equal where all tokens of all documents are."""
        self.num_bytes = int(arrays["num_bytes"])
        """Of the text, in UTF-8."""
        self.num_bad, self.first_bad = int(arrays["num_bad"]), str(arrays["first_bad"])
        """Records that are no documents, and were passed over; the first of them, as an error."""
        self.block_starts: Starts = arrays["block_starts"].astype(np.int64)
        """(blocks + 1,) first token of each block of documents."""
        self._length_checksums = arrays["length_checksums"]
        self._part_starts = arrays["part_starts"].astype(np.int64)
        self.num_tokens = int(self.block_starts[-1])
        self.num_documents = int(arrays["num_documents"])
        self._dtype = np.dtype(str(arrays["dtype"]))
        columns = (arrays[name].tolist() for name in ("sources", "offsets", "stamps"))
        places = enumerate(zip(*columns, strict=True))
        self._parts = [Part(folder, number, *place) for number, place in places]
        if looks_at_parts:
            sizes = np.diff(self._part_starts) * self._dtype.itemsize
            for part, size in zip(self._parts, sizes.tolist(), strict=True):
                if not is_address(part.tokens):
                    _check_size(Path(part.tokens), part.offset + size)
        _check_size(folder / LENGTHS, 4 * self.num_documents)
        self._blocks = blocks
        self._opened = functools.cache(self._open_part)
        self._lengths = RangeFile(str(folder / LENGTHS))

    def lengths(self, block: int) -> Lengths:
        """Tokens of each document in a block, in the order in which they lie."""
        begin = block * BLOCK_DOCUMENTS
        count = min(BLOCK_DOCUMENTS, self.num_documents - begin)
        expected = self._length_checksums[block]
        content = _checked(self._lengths, 4 * begin, 4 * count, expected)
        if content is None:
            raise self._damage(LENGTHS, f"{self.folder / LENGTHS}: damaged")
        return np.frombuffer(content, np.uint32)

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens `begin` to `end`, which lie in one document.

        Raises:
            ConfigError: if they are not as they were written.
            StorageError: if they cannot be read.
        """
        number = int(self._part_starts.searchsorted(begin, side="right")) - 1
        part, file, is_checked, expected = self._opened(number)
        first, last = (int(i) * self._dtype.itemsize for i in self._part_starts[number:][:2])
        size, end = last - first, end * self._dtype.itemsize - first
        begin = begin * self._dtype.itemsize - first
        blocks = range(begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)
        try:
            if all(is_checked[block] for block in blocks):
                content = file.read(part.offset + begin, end - begin)
                if len(content) < end - begin:
                    raise self._wrong(part, begin)
                return self._ids(content)
            whole = []
            for block in blocks:
                place = block * BLOCK_BYTES
                length = min(BLOCK_BYTES, size - place)
                checked = _checked(file, part.offset + place, length, expected[block])
                if checked is None:
                    raise self._wrong(part, place)
                whole.append(checked)
                # a block of object storage may come from there again
                is_checked[block] = file.is_local
        except (ChangedError, FileNotFoundError) as error:
            raise changed_source(part, str(error).partition("\n")[0]) from error
        place = blocks[0] * BLOCK_BYTES
        return self._ids(b"".join(whole)[begin - place : end - place])

    def _ids(self, content: bytes) -> npt.NDArray[np.unsignedinteger]:
        ids: npt.NDArray[np.unsignedinteger] = np.frombuffer(content, self._dtype)
        return ids.astype("<u4") if self._dtype.itemsize == 8 else ids

    def _wrong(self, part: Part, place: int) -> ConfigError:
        if part.source:
            return changed_source(part, f"byte {part.offset + place} or one after it")
        return self._damage(str(part.number), f"{part.tokens}: damaged at byte {place}")

    def _open_part(
        self, number: int
    ) -> tuple[Part, RangeFile, npt.NDArray[np.bool_], npt.NDArray[np.generic]]:
        """Return a part, its file, which of its blocks have been checked, and all checksums."""
        part = self._parts[number]
        try:
            expected = load_arrays(part.index, OF_PART)["token_checksums"]
        except DamagedCacheError as error:
            raise self._damage(str(number), f"{part.index}: damaged: {error}") from error
        file = RangeFile(part.tokens, part.stamp, self._blocks)
        return part, file, np.zeros(len(expected), np.bool_), expected

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


def _checked(file: RangeFile, begin: int, size: int, expected: object) -> bytes | None:
    """Return bytes of a file, as they are on the disk if those in memory are wrong; None if they
    are so there."""
    content = file.read(begin, size)
    if zlib.crc32(content) == expected:
        return content
    content = file.read_again(begin, size)
    if zlib.crc32(content) != expected:
        return None
    where = f"bytes {begin} to {begin + size}"
    warn_once(f"{file.path}: {where} were wrong in memory, and are right on the disk")
    return content


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise DamagedCacheError(
            f"{path.name} is missing" if found is None else f"{path.name} has {found} of {size} B"
        )
