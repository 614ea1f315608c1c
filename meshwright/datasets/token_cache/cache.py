"""Tokens in files: written once, read by ranges by every rank.

A cache is a folder. Of each part, which one process wrote: `00000.tokens`, the ids of its documents
one after the other, uint16 or uint32; and `00000.npz`, the lengths of the documents and checksums.
Of the whole: `lengths`, uint32; and `cache.npz`, which is there only if all else is. Where the
tokens are files of others, it has the path or address of each part's, the byte it starts at, and
the stamp of its content in object storage.
"""

import errno
import functools
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.data_file import ChangedError, DataFile, is_address
from meshwright.datasets.encoding import loss_line
from meshwright.datasets.ranges import RangeFile
from meshwright.system.errors import ConfigError
from meshwright.system.files import warn_once

BLOCK_BYTES = 1 << 16
"""Tokens are checked in blocks of this many bytes."""

BLOCK_DOCUMENTS = 1 << 10
"""Lengths of documents are checked, and documents shuffled, in blocks of this many."""

PIECE_TOKENS = 1 << 20
"""Tokens of two caches are compared in pieces of this many."""

CACHE_KEY = "training.token_cache_folder"

LENGTHS = "lengths"

DAMAGED = "damaged"
"""Notes of readers, a line each: numbers of parts, or `LENGTHS`, whose content is wrong. The next
job looks into them; others may be reading the files meanwhile."""

Lengths = npt.NDArray[np.uint32]

Starts = npt.NDArray[np.int64]


def starts_of(sizes: Sequence[int]) -> Starts:
    """(n,) sizes -> (n + 1,) where each starts, and the end."""
    return np.cumsum([0, *sizes], dtype=np.int64)


class PartIndex(NamedTuple):
    """The metadata of a part: the arrays of its .npz."""

    lengths: Lengths
    """Tokens of each document."""
    token_checksums: npt.NDArray[np.uint32]
    """CRC-32 of each block of `BLOCK_BYTES`."""
    num_bytes: int
    """Of the text, in UTF-8."""
    dtype: str
    offset: int = 0
    """Byte that the tokens start at,"""
    stamp: str = ""
    """and the stamp of the content, of a file of others."""
    num_bad: int = 0
    """Records that are no documents,"""
    bad: npt.NDArray[np.str_] = np.empty(0, np.str_)
    """and the first of them, as errors."""
    num_lost: int = 0
    """Characters without a token, and all of them; see `Encoder`."""
    num_characters: int = 0

    @property
    def num_tokens(self) -> int:
        """In the whole part."""
        return int(self.lengths.sum(dtype=np.uint64))

    @property
    def size(self) -> int:
        """Bytes of its tokens."""
        return self.num_tokens * np.dtype(self.dtype).itemsize


OF_CACHE = (
    "content",
    "num_bytes",
    "num_documents",
    "dtype",
    "part_starts",
    "block_starts",
    "length_checksums",
    "sources",
    "offsets",
    "stamps",
    "num_bad",
    "first_bad",
    "num_lost",
    "num_characters",
)
"""Arrays that are kept of the whole."""


class DamagedCacheError(Exception):
    """A file of a cache isn't as it was written."""


@dataclass(frozen=True)
class Part:
    """One part on disk."""

    folder: Path
    number: int
    source: DataFile | None = None
    """File of others that holds its tokens."""

    @property
    def own(self) -> Path:
        """File of tokens in the folder."""
        return self.folder / f"{self.number:05}.tokens"

    @property
    def tokens(self) -> str:
        """Path or address of the file that holds its tokens."""
        return str(self.own) if self.source is None else self.source.path

    @property
    def index(self) -> Path:
        """Written after `tokens`: if it is there, the part is complete."""
        return self.folder / f"{self.number:05}.npz"


def changed_source(part: Part, what: str) -> ConfigError:
    """Return the error of a file of others that isn't as it was: only its owner knows why."""
    fix = f"restore it, or delete {part.folder} to accept it as it is"
    message = f"{part.tokens}: has changed since it was indexed: {what}"
    return ConfigError(CACHE_KEY, f"{message}\n  fix: {fix}")


def load_arrays(path: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays `names` of an .npz, whose format has its own checksums.

    Raises:
        DamagedCacheError: if it isn't whole, or isn't there.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except Exception as error:  # zipfile and numpy raise a dozen kinds over a flipped bit
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EINVAL, None):
            raise  # it wasn't read
        raise DamagedCacheError(f"{path.name}: {error}") from error


def load_index(part: Part) -> PartIndex:
    """Load the index of a part; see `load_arrays`."""
    arrays = load_arrays(part.index, PartIndex._fields)
    fields: dict[str, Any] = {name: a if a.ndim else a.item() for name, a in arrays.items()}
    return PartIndex(**fields)


class PartTokens:
    """The tokens of a part, of which each block is held against its checksum when it is first read.

    Args:
        blocks: of tokens that lie in object storage.
    """

    def __init__(self, part: Part, index: PartIndex, blocks: BlockCache | None = None) -> None:
        self.part, self.index = part, index
        self._file = RangeFile(part.tokens, index.stamp, blocks)
        self._offset, self._size = index.offset, index.size
        self._expected = index.token_checksums
        self._is_checked = np.zeros(len(self._expected), np.bool_)

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` of its tokens.

        Raises:
            DamagedCacheError: if they aren't as they were written.
            OSError: as `RangeFile.read`.
        """
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1
        if not self._is_checked[first:last].all():
            whole = b"".join(map(self._block, range(first, last)))
            return whole[begin - first * BLOCK_BYTES :][: end - begin]
        content = self._file.read(self._offset + begin, end - begin)
        if len(content) < end - begin:
            raise DamagedCacheError(f"damaged at byte {self._offset + begin}")
        return content

    def check(self) -> None:
        """Read all blocks; see `read`."""
        for number in range(len(self._expected)):
            self._block(number)

    def _block(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._size - begin)
        content = _checked(self._file, self._offset + begin, size, self._expected[number])
        # a block of object storage may come from there again
        self._is_checked[number] = self._file.is_local
        return content


class CachedDocument(NamedTuple):
    """Where a document lies in a cache."""

    number: int
    """In the order of the cache, from 0 on."""
    begin: int
    """Its first token in the cache."""
    end: int
    """The token after its last."""


class TokenCache:
    """A complete cache, read as one array of tokens.

    The first read of a block verifies its checksum, so that no token is ever wrong.

    Args:
        looks_at_parts: also look whether every file of tokens has its size. Where another process
            of the job has done so, reading finds a file that is cut short.
        blocks: of tokens that lie in object storage.

    Raises:
        DamagedCacheError: if it isn't complete: a file is missing, or hasn't the size it had.
    """

    def __init__(
        self, folder: Path, *, looks_at_parts: bool = True, blocks: BlockCache | None = None
    ) -> None:
        self.folder = folder
        arrays = load_arrays(folder / "cache.npz", OF_CACHE)
        self.content = str(arrays["content"])
        """Hash: equal where all tokens of all documents are."""
        self.num_bytes, self.num_documents = int(arrays["num_bytes"]), int(arrays["num_documents"])
        self.num_bad, self.first_bad = int(arrays["num_bad"]), str(arrays["first_bad"])
        """Records that are no documents, and were skipped; the first of them, as an error."""
        self._num_lost, self._num_characters = (
            int(arrays[name]) for name in ("num_lost", "num_characters")
        )
        self.block_starts: Starts = arrays["block_starts"].astype(np.int64)
        """(blocks + 1,) first token of each block of documents."""
        self._length_checksums = arrays["length_checksums"]
        self._part_starts = arrays["part_starts"].astype(np.int64)
        self.num_tokens = int(self.block_starts[-1])
        self._dtype = np.dtype(str(arrays["dtype"]))
        self._parts = [
            Part(folder, number, DataFile(source) if source else None)
            for number, source in enumerate(arrays["sources"].tolist())
        ]
        self._stamps = arrays["stamps"].tolist()
        if looks_at_parts:
            ends = arrays["offsets"] + np.diff(self._part_starts) * self._dtype.itemsize
            for part, end in zip(self._parts, ends.tolist(), strict=True):
                if not is_address(part.tokens):
                    _check_size(Path(part.tokens), end)
        _check_size(folder / LENGTHS, 4 * self.num_documents)
        self._blocks = blocks
        self._opened = functools.cache(self._open_part)
        self._lengths = RangeFile(str(folder / LENGTHS))

    @property
    def loss_line(self) -> str:
        """As `encoding.loss_line`, of all documents."""
        return loss_line(self._num_lost, self._num_characters)

    def lengths(self, block: int) -> Lengths:
        """Tokens of each document in a block, in the order in which they lie."""
        begin = block * BLOCK_DOCUMENTS
        count = min(BLOCK_DOCUMENTS, self.num_documents - begin)
        try:
            content = _checked(self._lengths, 4 * begin, 4 * count, self._length_checksums[block])
        except DamagedCacheError as error:
            raise self._damage(LENGTHS, f"{self.folder / LENGTHS}: {error}") from error
        return np.frombuffer(content, np.uint32)

    def document_at(self, position: int) -> "CachedDocument":
        block = int(self.block_starts.searchsorted(position, side="right")) - 1
        ends = self.block_starts[block] + np.cumsum(self.lengths(block), dtype=np.int64)
        index = int(ends.searchsorted(position, side="right"))
        begin = ends[index - 1] if index else self.block_starts[block]
        return CachedDocument(block * BLOCK_DOCUMENTS + index, int(begin), int(ends[index]))

    def document(self, number: int) -> "CachedDocument":
        """Return a document by its number, from 0 to `num_documents` - 1."""
        block, index = divmod(number, BLOCK_DOCUMENTS)
        before = int(self.lengths(block)[:index].sum(dtype=np.int64))
        return self.document_at(int(self.block_starts[block]) + before)

    def first_other_document(self, other: "TokenCache") -> int:
        """Return the number of the first document that isn't the same in another cache; the number
        of documents, where one cache begins with all of the other.

        Checksums are compared first. Tokens are read of blocks that differ, and where the parts of
        the caches begin at other tokens, as after the document.
        """
        number = min(self.num_documents, other.num_documents)
        count = min(len(self._length_checksums), len(other._length_checksums))
        differs = self._length_checksums[:count] != other._length_checksums[:count]
        for block in np.flatnonzero(differs).tolist():
            ours, theirs = self.lengths(block), other.lengths(block)
            common = min(len(ours), len(theirs))
            if (unequal := np.flatnonzero(ours[:common] != theirs[:common])).size:
                number = block * BLOCK_DOCUMENTS + int(unequal[0])
                break
        end = self.document(number - 1).end if number else 0
        position = self._first_other_token(other, end)
        return number if position is None else self.document_at(position).number

    def _first_other_token(self, other: "TokenCache", end: int) -> int | None:
        """Return the first position below `end` that has a different token in another cache."""
        position = 0
        while position < end:
            numbers = [
                int(c._part_starts.searchsorted(position, "right")) - 1 for c in (self, other)
            ]
            starts = [c._part_starts[n] for c, n in zip((self, other), numbers, strict=True)]
            ends = [c._part_starts[n + 1] for c, n in zip((self, other), numbers, strict=True)]
            stop = min(*map(int, ends), end)
            if starts[0] == starts[1] == position and self._dtype == other._dtype:
                ours, theirs = (
                    c._opened(n).index.token_checksums
                    for c, n in zip((self, other), numbers, strict=True)
                )
                count = min(len(ours), len(theirs))
                unequal = np.flatnonzero(ours[:count] != theirs[:count])
                equal = int(unequal[0]) if unequal.size else count
                position = min(position + equal * BLOCK_BYTES // self._dtype.itemsize, stop)
            piece = min(position + PIECE_TOKENS, stop)
            if piece > position:
                apart = self.tokens(position, piece) != other.tokens(position, piece)
                if apart.any():
                    return position + int(apart.argmax())
            position = piece
        return None

    def place_of(self, document: "CachedDocument") -> tuple[Part, int]:
        """Return the part that holds a document, and how many of the part lie before it."""
        number = int(self._part_starts.searchsorted(document.begin, side="right")) - 1
        lengths = self._opened(number).index.lengths
        ends = self._part_starts[number] + np.cumsum(lengths, dtype=np.int64)
        return self._parts[number], int(ends.searchsorted(document.begin, side="right"))

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens `begin` to `end`, which lie in one document.

        Raises:
            ConfigError: if they aren't as they were written.
            StorageError: if they can't be read.
        """
        number = int(self._part_starts.searchsorted(begin, side="right")) - 1
        opened, first, item = self._opened(number), self._part_starts[number], self._dtype.itemsize
        part = opened.part
        try:
            content = opened.read(int(begin - first) * item, int(end - first) * item)
        except (ChangedError, FileNotFoundError) as error:
            raise changed_source(part, str(error).partition("\n")[0]) from error
        except DamagedCacheError as error:
            if part.source:
                raise changed_source(part, str(error)) from error
            raise self._damage(str(number), f"{part.tokens}: {error}") from error
        ids: npt.NDArray[np.unsignedinteger] = np.frombuffer(content, self._dtype)
        return ids.astype("<u4") if item == 8 else ids

    def _open_part(self, number: int) -> PartTokens:
        part, stamp = self._parts[number], self._stamps[number]
        try:  # of the content that this cache was joined of, whoever makes the index again
            return PartTokens(part, load_index(part)._replace(stamp=stamp), self._blocks)
        except DamagedCacheError as error:
            raise self._damage(str(number), f"{part.index}: damaged: {error}") from error

    def _damage(self, which: str, what: str) -> ConfigError:
        """Note damage for the next job; other jobs may still read the files that are there."""
        try:
            with open(self.folder / DAMAGED, "a") as file:
                file.write(f"{which}\n")
        except OSError as error:
            fix = (
                f"delete {self.folder} ({error.strerror}), or set {CACHE_KEY} to a different folder"
            )
        else:
            fix = "run the same command again: it checks this part, and repairs it"
        return ConfigError(CACHE_KEY, f"{what}\n  fix: {fix}")


def _checked(file: RangeFile, begin: int, size: int, expected: object) -> bytes:
    """Return bytes of a file, as they are on the disk if those in memory are wrong.

    Raises:
        DamagedCacheError: if they are wrong there as well.
    """
    content = file.read(begin, size)
    if zlib.crc32(content) == expected:
        return content
    content = file.read_again(begin, size)
    if zlib.crc32(content) != expected:
        raise DamagedCacheError(f"damaged at byte {begin}")
    where = f"bytes {begin} to {begin + size}"
    warn_once(f"{file.path}: {where} were wrong in memory, and are right on the disk")
    return content


def _check_size(path: Path, size: int) -> None:
    actual = path.stat().st_size if path.exists() else None
    if actual != size:
        raise DamagedCacheError(
            f"{path.name} is missing" if actual is None else f"{path.name} has {actual} of {size} B"
        )
