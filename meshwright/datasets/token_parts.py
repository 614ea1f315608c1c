"""The parts of a token cache: an index, and tokens that lie in the cache or in a file of others.

Whoever has written the tokens (we, Megatron-LM, datatrove, numpy), they are read in one way.
"""

import errno
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.data_file import DataFile
from meshwright.datasets.ranges import RangeFile
from meshwright.system.errors import ConfigError
from meshwright.system.files import warn_once

BLOCK_BYTES = 1 << 16
"""Tokens are checked in blocks of this many bytes."""

CACHE_KEY = "training.token_cache_folder"

Lengths = npt.NDArray[np.uint32]

Starts = npt.NDArray[np.int64]


def starts_of(sizes: Sequence[int]) -> Starts:
    """(n,) sizes -> (n + 1,) where each starts, and the end."""
    return np.cumsum([0, *sizes], dtype=np.int64)


class DamagedCacheError(Exception):
    """A file of a cache isn't as it was written."""


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
        content = read_checked(self._file, self._offset + begin, size, self._expected[number])
        # a block of object storage may come from there again
        self._is_checked[number] = self._file.is_local
        return content


def read_checked(file: RangeFile, begin: int, size: int, expected: object) -> bytes:
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
