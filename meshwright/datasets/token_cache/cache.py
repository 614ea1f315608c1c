"""Tokens in files: written once, read by ranges by every rank.

A cache is a folder. Of each part, which one process wrote: `00000.tokens`, the ids of its documents
one after the other, uint16 or uint32; and `00000.npz`, the lengths of the documents and checksums.
Of the whole: `lengths`, uint32; and `cache.npz`, which is there only if all else is. Where the
tokens are files of others, it has the path or address of each part's, the byte it starts at, and
the stamp of its content in object storage.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.data_file import ChangedError, DataFile, is_address
from meshwright.datasets.encoding import loss_line
from meshwright.datasets.ranges import RangeFile
from meshwright.datasets.token_parts import (
    BLOCK_BYTES,
    CACHE_KEY,
    DamagedCacheError,
    Lengths,
    Part,
    PartTokens,
    Starts,
    changed_source,
    load_arrays,
    load_index,
    read_checked,
)
from meshwright.system.errors import ConfigError

BLOCK_DOCUMENTS = 1 << 10
"""Lengths of documents are checked, and documents shuffled, in blocks of this many."""

PIECE_TOKENS = 1 << 20
"""Tokens of two caches are compared in pieces of this many."""

LENGTHS = "lengths"

DAMAGED = "damaged"
"""Notes of readers, a line each: numbers of parts, or `LENGTHS`, whose content is wrong. The next
job looks into them; others may be reading the files meanwhile."""

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
            content = read_checked(
                self._lengths, 4 * begin, 4 * count, self._length_checksums[block]
            )
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


def _check_size(path: Path, size: int) -> None:
    actual = path.stat().st_size if path.exists() else None
    if actual != size:
        raise DamagedCacheError(
            f"{path.name} is missing" if actual is None else f"{path.name} has {actual} of {size} B"
        )
