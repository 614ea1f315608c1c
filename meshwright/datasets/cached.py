"""Samples of a token cache: any of them, at once, in an order that differs each epoch."""

import functools
from bisect import bisect_right

import numpy as np

from meshwright.datasets.encoding import Raw, Sample, to_sample
from meshwright.datasets.order import permutation, permuted
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.packing import Packing

BLOCKS_KEPT = 64
"""Of 1024 documents each, some 80 KiB."""


class CachedSamples:
    """Sample n of all epochs is a pure function of the cache, the seed and n.

    In each epoch documents are shuffled in blocks of `token_cache.BLOCK_DOCUMENTS`, laid end to
    end, cut into samples, and those shuffled as a whole. A block has the same number of tokens in
    any order: so the place of a sample is known without adding up the lengths of all documents
    before it, and neither time nor memory grows with the data. The rest at an epoch's end is
    less than a sample.

    Args:
        length: tokens of a sample.
        seed: of the order; None: documents and samples stay as they lie.
    """

    def __init__(self, cache: TokenCache, length: int, seed: int | None) -> None:
        self._cache, self._length, self._seed = cache, length, seed
        self.samples_per_epoch = cache.num_tokens // length
        self._block = functools.lru_cache(BLOCKS_KEPT)(self._shuffled_block)

    def read(self, index: int) -> Sample:
        """Sample `index`, counted over all epochs."""
        epoch, position = divmod(index, self.samples_per_epoch)
        if self._seed is not None:
            position = permuted(position, self.samples_per_epoch, self._seed, epoch)
        return self._sample(epoch, position)

    def _sample(self, epoch: int, position: int) -> Sample:
        """Sample `position` of an epoch, before samples are shuffled."""
        begin, missing = position * self._length, self._length
        pieces: list[Raw] = []
        block = int(self._cache.block_starts.searchsorted(begin, side="right")) - 1
        while missing:
            first = int(self._cache.block_starts[block])
            found = self._read_block(epoch, block, begin - first, missing)
            count = sum(map(len, found))
            pieces, missing = pieces + found, missing - count
            begin, block = begin + count, block + 1
        return to_sample(pieces)

    def _read_block(self, epoch: int, block: int, begin: int, count: int) -> list[Raw]:
        """Up to `count` tokens of a shuffled block from its token `begin` on, by document."""
        starts, ends = self._block(epoch, block)
        pieces = []
        document = bisect_right(ends, begin)
        while count and document < len(ends):
            # where the document lies, moved to where the sample begins in it
            shift = starts[document] - (ends[document - 1] if document else 0)
            end = min(begin + count, ends[document])
            pieces.append(self._cache.tokens(shift + begin, shift + end))
            count, begin, document = count - (end - begin), end, document + 1
        return pieces

    def _shuffled_block(self, epoch: int, block: int) -> tuple[list[int], list[int]]:
        """Return where each document, in this epoch's order, begins in the cache, and where it ends
        in the block."""
        lengths = self._cache.lengths(block).astype(np.int64)
        starts = self._cache.block_starts[block] + np.cumsum(lengths) - lengths
        if self._seed is not None:
            order = permutation(len(lengths), self._seed, epoch, block)
            starts, lengths = starts[order], lengths[order]
        return starts.tolist(), np.cumsum(lengths).tolist()  # lists are quicker to look into


class PackedSamples(CachedSamples):
    """Samples of whole documents.

    A sample has the same documents in every epoch. Their order and the order of samples differ.
    """

    def __init__(self, cache: TokenCache, packing: Packing, seed: int | None) -> None:
        super().__init__(cache, packing.capacity, seed)
        self._packing, self.samples_per_epoch = packing, int(packing.bin_starts[-1])

    def _sample(self, epoch: int, position: int) -> Sample:
        window = int(self._packing.bin_starts.searchsorted(position, side="right")) - 1
        pieces, first = self._packing.window(window), int(self._packing.bin_starts[window])
        bounds = pieces["bin"].searchsorted([position - first, position - first + 1])
        own = pieces[slice(*bounds)]
        if self._seed is not None:
            own = own[permutation(len(own), self._seed, epoch, position)]
        begins, ends = own["begin"].tolist(), (own["begin"] + own["length"]).tolist()
        raw = [self._cache.tokens(*place) for place in zip(begins, ends, strict=True)]
        return to_sample(raw, padded_to=self._length)
