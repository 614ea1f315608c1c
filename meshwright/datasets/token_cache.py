"""Tokens in files: written once, mapped into memory by every rank that reads them.

A cache is a folder. Of each part, which one process wrote: `00000.tokens`, the ids of its documents
one after the other, uint16 or uint32; and `00000.npz`, the lengths of the documents and checksums.
Of the whole: `lengths`, uint32; and `cache.npz`, which is there only if all else is. Where the
tokens are files of others, `sources.json` has the path of each part's, and the byte it begins at.
"""

import functools
import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.datasets.mapping import map_file
from meshwright.errors import ConfigError

BLOCK_BYTES = 1 << 16
"""Tokens are checked in blocks of this many bytes."""
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
    (folder / SOURCES).write_text(json.dumps(sources), "utf-8")


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


def load_arrays(path: Path, names: Collection[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the arrays `names` of an .npz, whose format has checksums of its own.

    Raises:
        DamagedCacheError: if it is not whole, or is not there.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except PermissionError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds over a flipped bit
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
        _check_size(folder / "lengths", 4 * self.num_documents)
        self._tokens = functools.cache(self._map_tokens)
        self._lengths: Lengths = map_file(folder / "lengths", np.uint32)

    def lengths(self, block: int) -> Lengths:
        """Tokens of each document in a block, in the order in which they lie."""
        begin = block * BLOCK_DOCUMENTS
        lengths = np.array(self._lengths[begin : begin + BLOCK_DOCUMENTS])
        if zlib.crc32(lengths.data) != self._length_checksums[block]:
            raise self._forget(None, f"{self.folder / 'lengths'}: damaged")
        return lengths

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """Tokens `begin` to `end`, which lie in one document: a view of the file."""
        number = int(self._part_starts.searchsorted(begin, side="right")) - 1
        tokens, is_checked, expected = self._tokens(number)
        first = int(self._part_starts[number])
        begin, end = begin - first, end - first
        width = BLOCK_BYTES // self._dtype.itemsize
        for block in range(begin // width, (end - 1) // width + 1):
            if not is_checked[block]:
                content = tokens[block * width : (block + 1) * width]
                if zlib.crc32(content.data) != expected[block]:
                    path = self._parts[number].tokens
                    where = f"{path}: damaged at byte {block * BLOCK_BYTES}"
                    raise self._forget(self._parts[number], where)
                is_checked[block] = True
        return tokens[begin:end]

    def _map_tokens(
        self, number: int
    ) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.bool_], npt.NDArray[np.generic]]:
        """Return a part's tokens, which of its blocks have been checked, and all checksums."""
        part = self._parts[number]
        try:
            expected = load_arrays(part.index, OF_PART)["token_checksums"]
        except DamagedCacheError as error:
            raise self._forget(part, f"{part.index}: damaged: {error}") from error
        tokens = map_file(part.tokens, np.uint8)[part.offset :].view(self._dtype)
        return tokens, np.zeros(len(expected), np.bool_), expected

    def _forget(self, part: Part | None, what: str) -> ConfigError:
        """Make the next job write the part, and the index, anew."""
        try:
            if part is not None:
                part.index.unlink(missing_ok=True)
            (self.folder / "cache.npz").unlink(missing_ok=True)
        except OSError as error:
            fix = f"delete {self.folder} ({error.strerror}), or set {CACHE_KEY} to another folder"
        else:
            fix = "start again: damaged parts are then made anew"
        return ConfigError(CACHE_KEY, f"{what}\n  fix: {fix}")


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise DamagedCacheError(
            f"{path.name} is missing" if found is None else f"{path.name} has {found} of {size} B"
        )
