"""Samples of whole documents: best-fit packing in windows.

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830),
section 3. A document that is longer than a sample is split into samples and a rest.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.datasets.order import permutation
from meshwright.datasets.ranges import RangeFile
from meshwright.datasets.samples import CachedSamples, Range
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_parts import (
    CACHE_KEY,
    DamagedCacheError,
    load_arrays,
    starts_of,
)
from meshwright.system.errors import ConfigError
from meshwright.system.files import warn_once, whole_file
from meshwright.system.log import busy

WINDOW = 16
"""Blocks of 1024 documents that are packed together. In a smaller window, the last sample, which
is mostly padding, would count more."""

WINDOWS_KEPT = 64
"""In memory, of some 256 KiB each."""

PIECE = np.dtype([("begin", "<i8"), ("length", "<u4"), ("bin", "<u4")])
"""Tokens that stay together: where they start in the cache, and in which sample of the window they
are."""

Pieces = npt.NDArray[np.void]
"""Of dtype `PIECE`."""

OF_PACKING = ("content", "bin_starts", "piece_starts", "checksums")


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.uint32]:
    """Return the bin of each piece: the longest first, each in the bin that it leaves the least
    room in.

    Args:
        lengths: from 1 to `capacity`.
    """
    rooms: list[list[int]] = [[] for _ in range(capacity)]  # bins, by their room
    some, count = 0, 0  # bit r of `some`: there is a bin with room r
    bins = np.empty(len(lengths), np.uint32)
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bin_ = rooms[room].pop()
            if not rooms[room]:
                some ^= 1 << room
        else:
            room, bin_, count = capacity, count, count + 1
        bins[piece], room = bin_, room - length
        if room:
            rooms[room].append(bin_)
            some |= 1 << room
    return bins


def pack_window(cache: TokenCache, window: int, capacity: int) -> Pieces:
    """Return the pieces of all documents of a window, by sample."""
    blocks = range(window * WINDOW, min((window + 1) * WINDOW, len(cache.block_starts) - 1))
    lengths = np.concatenate([cache.lengths(block) for block in blocks]).astype(np.int64)
    begins = cache.block_starts[blocks[0]] + np.cumsum(lengths) - lengths
    per_document = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), per_document)
    # of each piece, how many of its document are before it
    number = np.arange(len(document)) - (np.cumsum(per_document) - per_document)[document]
    pieces = np.empty(len(document), PIECE)
    pieces["begin"] = begins[document] + number * capacity
    pieces["length"] = np.minimum(lengths[document] - number * capacity, capacity)
    pieces["bin"] = best_fit(pieces["length"].astype(np.int64), capacity)
    return pieces[np.argsort(pieces["bin"], kind="stable")]


def pack(cache: TokenCache, capacity: int) -> Iterator[Pieces]:
    """Yield the pieces of every window, by sample."""
    for window in range(-(-(len(cache.block_starts) - 1) // WINDOW)):
        yield pack_window(cache, window, capacity)


@dataclass(frozen=True)
class Packing:
    """The samples of a cache, packed."""

    capacity: int
    """Tokens of a sample."""
    bin_starts: npt.NDArray[np.int64]
    """(windows + 1,) samples before each window."""
    window: Callable[[int], Pieces]
    """Returns the pieces of a window, by sample."""

    @property
    def num_samples(self) -> int:
        """Of an epoch."""
        return int(self.bin_starts[-1])


def packed_in_memory(cache: TokenCache, capacity: int) -> Packing:
    """Pack a cache. A window is computed whenever it is asked for."""
    bin_starts = starts_of([_num_bins(pieces) for pieces in pack(cache, capacity)])
    window = functools.partial(pack_window, cache, capacity=capacity)
    return Packing(capacity, bin_starts, functools.lru_cache(WINDOWS_KEPT)(window))


def stored_packing(cache: TokenCache, capacity: int) -> Packing:
    """Return the same, read from two files in the folder of the cache.

    Raises:
        DamagedCacheError: if they aren't there or not whole, or pack other tokens.
    """
    path = _path(cache, capacity)
    arrays = load_arrays(path.with_suffix(".npz"), OF_PACKING)
    if str(arrays["content"]) != cache.content:
        raise DamagedCacheError(f"{path.name} packs other tokens")
    starts = arrays["piece_starts"].astype(np.int64) * PIECE.itemsize
    if not path.exists() or path.stat().st_size != starts[-1]:
        raise DamagedCacheError(f"{path.name} is not whole")
    checksums, file = arrays["checksums"], RangeFile(str(path))

    @functools.lru_cache(WINDOWS_KEPT)
    def read(window: int) -> Pieces:
        begin, end = starts[window : window + 2].tolist()
        content = file.read(begin, end - begin)
        if zlib.crc32(content) != checksums[window]:
            fix = f"delete {path.with_suffix('.npz')}, and run the same command again"
            raise ConfigError(CACHE_KEY, f"{path}: damaged\n  fix: {fix}")
        return np.frombuffer(content, PIECE)

    return Packing(capacity, arrays["bin_starts"].astype(np.int64), read)


def open_packing(cache: TokenCache, capacity: int, *, again: bool = False) -> Packing:
    """Open the packing of a cache into samples of `capacity` tokens; first make it, if it can't be
    read. Processes that make it at the same time write the same files.

    Args:
        again: make it in any case.
    """
    if not again:
        with suppress(DamagedCacheError, OSError):
            return stored_packing(cache, capacity)
    try:
        with busy(f"packing {cache.num_documents:,} documents"):
            _store(cache, capacity)
    except OSError as error:
        warn_once(f"{cache.folder}: {error.strerror or error}: each rank packs documents by itself")
        return packed_in_memory(cache, capacity)
    return stored_packing(cache, capacity)


def _store(cache: TokenCache, capacity: int) -> None:
    path = _path(cache, capacity)
    bins, lengths, checksums = list[int](), list[int](), list[int]()
    with whole_file(path) as file:
        for pieces in pack(cache, capacity):
            content = pieces.tobytes()
            bins.append(_num_bins(pieces))
            lengths.append(len(pieces))
            checksums.append(zlib.crc32(content))
            file.write(content)
    with whole_file(path.with_suffix(".npz")) as file:
        np.savez(
            file,
            content=np.str_(cache.content),
            bin_starts=starts_of(bins),
            piece_starts=starts_of(lengths),
            checksums=np.array(checksums, np.uint32),
        )


def _path(cache: TokenCache, capacity: int) -> Path:
    """Return the file of all pieces; their starts and checksums are in an .npz next to it."""
    return cache.folder / f"packed-{capacity}"


def _num_bins(pieces: Pieces) -> int:
    return int(pieces["bin"][-1]) + 1 if len(pieces) else 0


class PackedSamples(CachedSamples):
    """Samples of whole documents: the same ones in every epoch, in a different order."""

    def __init__(self, cache: TokenCache, packing: Packing, seed: int | None) -> None:
        super().__init__(cache, packing.capacity, seed)
        self._packing, self.samples_per_epoch = packing, packing.num_samples

    def _ranges(self, epoch: int, position: int) -> list[Range]:
        window = int(self._packing.bin_starts.searchsorted(position, side="right")) - 1
        pieces, first = self._packing.window(window), int(self._packing.bin_starts[window])
        bounds = pieces["bin"].searchsorted([position - first, position - first + 1])
        own = pieces[slice(*bounds)]
        if self._seed is not None:
            own = own[permutation(len(own), self._seed, epoch, position)]
        begins, ends = own["begin"].tolist(), (own["begin"] + own["length"]).tolist()
        return list(zip(begins, ends, strict=True))
