"""Samples: tokens of equal number. Of a token cache, any of them at once, in an order that differs
each epoch; documents are split where a sample ends."""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.order import permutation, permuted
from meshwright.datasets.token_cache.cache import TokenCache

Raw = npt.NDArray[np.unsignedinteger]
"""Ids as they are kept: of 16 bits, or of 32 of which `NO_LOSS` is one."""


@dataclass(frozen=True)
class Sample:
    """S + 1 tokens, of which each but the first is the label of the one before."""

    raw: Raw
    lengths: list[int]
    """Of the pieces of documents that it is made of; the padding counts as one."""
    padding: int = 0
    """Tokens at its end that are of no document."""
    streamed_from: Sequence[str] = ()
    """Of a streamed source: the document of each piece, in words."""
    source: int = 0
    """Its number among the sources of a mixture."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Ids."""
        return self.raw.astype(np.int64) & ~NO_LOSS

    @property
    def documents(self) -> npt.NDArray[np.int32]:
        """Which document of the sample a token belongs to: 0, 1, ..."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)


@dataclass(frozen=True)
class SampleRules:
    """How samples are made of sources: the same for all sources of a job, and on all ranks."""

    length: int
    """Tokens of a sample."""
    seed: int | None
    """Of every shuffle; None: samples of caches come in the order in which they lie."""
    max_epochs: int = 0
    """Times that a source may be read; 0: no limit."""
    max_bad_records: int = 0
    """Records of streamed sources that may be skipped, in all shards that are read here."""


def to_sample(pieces: Sequence[Raw], *, padded_to: int = 0) -> Sample:
    """Join pieces of documents, one after the other.

    Args:
        padded_to: tokens that the sample has at least; the loss leaves out the padding.
    """
    lengths = [len(piece) for piece in pieces]
    padding = max(padded_to - sum(lengths), 0)
    if padding:
        pieces, lengths = [*pieces, blank_sample(padding).raw], [*lengths, padding]
    return Sample(np.concatenate(pieces), lengths, padding)


def blank_sample(length: int) -> Sample:
    """Return a sample that the loss leaves out."""
    return Sample(np.full(length, NO_LOSS, np.uint32), [length])


Range = tuple[int, int]
"""First token in a cache, and the one after the last."""

BLOCKS_KEPT = 64
"""Of 1024 documents each, some 80 KiB."""


class CachedSamples:
    """Sample n of all epochs is a pure function of the cache, the seed and n.

    In each epoch documents are shuffled in blocks of `BLOCK_DOCUMENTS`, laid end to end, split into
    samples of `length` tokens, and those shuffled as a whole; without a seed, all stays as it lies.
    A block has the same number of tokens in any order, so neither time nor memory grows with the
    data. The rest at an epoch's end is less than a sample.
    """

    def __init__(self, cache: TokenCache, length: int, seed: int | None) -> None:
        self._cache, self._length, self._seed = cache, length, seed
        self.samples_per_epoch = cache.num_tokens // length
        self._block = functools.lru_cache(BLOCKS_KEPT)(self._shuffled_block)

    def read(self, index: int) -> Sample:
        """Sample `index`, counted over all epochs."""
        pieces = [self._cache.tokens(*part) for part in self.ranges(index)]
        return to_sample(pieces, padded_to=self._length)

    def ranges(self, index: int) -> list[Range]:
        """Return where the pieces of sample `index` lie in the cache."""
        epoch, position = divmod(index, self.samples_per_epoch)
        if self._seed is not None:
            position = permuted(position, self.samples_per_epoch, self._seed, epoch)
        return self._ranges(epoch, position)

    def _ranges(self, epoch: int, position: int) -> list[Range]:
        """Return the ranges of sample `position` of an epoch, before samples are shuffled."""
        begin, found = position * self._length, list[Range]()
        end = begin + self._length
        block = int(self._cache.block_starts.searchsorted(begin, side="right")) - 1
        while begin < end:
            shifts, ends = self._block(epoch, block)
            document = bisect_right(ends, begin)
            while begin < end and document < len(ends):
                stop, shift = min(end, ends[document]), shifts[document]
                found.append((begin + shift, stop + shift))
                begin, document = stop, document + 1
            block += 1
        return found

    def _shuffled_block(self, epoch: int, block: int) -> tuple[list[int], list[int]]:
        """Return of each document, in this epoch's order, how far it lies in the cache behind its
        place in the epoch, and where it ends in the epoch."""
        lengths = self._cache.lengths(block).astype(np.int64)
        first = self._cache.block_starts[block]
        starts = first + np.cumsum(lengths) - lengths
        if self._seed is not None:
            order = permutation(len(lengths), self._seed, epoch, block)
            starts, lengths = starts[order], lengths[order]
        ends = first + np.cumsum(lengths)
        return (starts - ends + lengths).tolist(), ends.tolist()  # lists are quicker to look into
