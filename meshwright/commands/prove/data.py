"""The data of a small job: synthetic documents in memory, read by the trainer's own loader."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from meshwright.commands.prove.measurement import SAVED_STEP
from meshwright.config.training import Source, Training
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.encoding import NO_LOSS, Encoder, Tokens
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.named_sources import entries
from meshwright.datasets.packing import packed_in_memory
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.shards import StreamedSource
from meshwright.datasets.stream import Cursor, OpenSource
from meshwright.datasets.token_cache.cache import BLOCK_DOCUMENTS, TokenCache
from meshwright.datasets.tokenizers.kinds import ByteTokenizer

NUM_DOCUMENTS = 1500
"""More than one block of a cache."""

SHORTEST, LONGEST = 3, 20
"""Tokens of a document."""

SHORTEST_PACKED = 14
"""Where documents are packed: then a third of the samples have padding."""

MISSING = (0.0, 0.0, 0.5, 1.0)
"""Share of a document's tokens that are no labels; each document draws one of these."""


@lru_cache(maxsize=8)  # a rank has one case after another, and most have the same data
def documents(vocab_size: int, seed: int, shortest: int = SHORTEST) -> list[Tokens]:
    """uint32 ids from the whole vocabulary, some with `NO_LOSS`.

    The next id is mostly the last one plus a number that the document keeps: attention within a
    document has something to learn, and from other documents it would learn something else.
    """
    random = np.random.default_rng(seed)
    pieces = list[Tokens]()
    for _ in range(NUM_DOCUMENTS):
        length = random.integers(shortest, LONGEST + 1)
        ids = random.integers(vocab_size) + random.integers(1, 8) * np.arange(length)
        ids = np.where(random.random(length) < 0.2, random.integers(vocab_size, size=length), ids)
        is_missing = random.random(length) < random.choice(MISSING)
        pieces.append((ids % vocab_size + NO_LOSS * is_missing).astype(np.uint32))
    return pieces


class MemoryCache(TokenCache):
    """A token cache that lies in memory: nothing is tokenized, and every rank makes the same."""

    loss_line = ""

    def __init__(self, pieces: list[Tokens]) -> None:  # not the base's: there is no folder
        self._all = np.concatenate(pieces)
        self._all_lengths = np.array([len(piece) for piece in pieces], np.uint32)
        self.content = f"{zlib.crc32(self._all.data):08x}"
        self.num_documents, self.num_tokens = len(pieces), len(self._all)
        ends = np.cumsum(self._all_lengths, dtype=np.int64)
        self.block_starts = np.array(
            [0, *ends[BLOCK_DOCUMENTS - 1 : -1 : BLOCK_DOCUMENTS], ends[-1]]
        )

    def lengths(self, block: int) -> npt.NDArray[np.uint32]:
        """As the base's."""
        begin = block * BLOCK_DOCUMENTS
        return self._all_lengths[begin : begin + BLOCK_DOCUMENTS]

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """As the base's."""
        return self._all[begin:end]


class _Numbered(Encoder):
    """Gives the tokens of a document whose text is its number."""

    def __init__(self, pieces: list[Tokens]) -> None:
        self._pieces = pieces

    def encode(self, document: object) -> Tokens:
        return self._pieces[int(str(document))]


class Vocabulary(ByteTokenizer):
    """In the place of a tokenizer: every id of the model stands for some bytes of text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @cached_property
    def token_bytes(self) -> list[int]:
        """Of each of the V ids, as validations ask for it."""
        return [number % 5 for number in range(self.vocab_size)]


def documents_of(training: Training, vocab_size: int, seed: int) -> list[Tokens]:
    """Return the documents that `open_source` reads."""
    shortest = SHORTEST if training.packing == "cut" else SHORTEST_PACKED
    return documents(vocab_size, seed, shortest)


SYNTHETIC = SourceEntry("training", "synthetic", Source(dataset="synthetic"))


def parts_of(training: Training) -> list[tuple[SourceEntry, int]]:
    """Return the sources of the small job, and the seed of each one's documents."""
    if not training.datasets:
        return [(SYNTHETIC, training.seed)]
    parts = enumerate(entries(training, "training"))
    return [
        (replace(entry, source=SYNTHETIC.source), training.seed + 2 * number)
        for number, entry in parts
    ]


def open_source(
    training: Training, vocab_size: int, seed: int, entry: SourceEntry = SYNTHETIC
) -> OpenSource:
    """Documents in memory, streamed or not as `training` says."""
    pieces, is_cut = documents_of(training, vocab_size, seed), training.packing == "cut"
    if training.dataset_mode != "streamed":
        cache = MemoryCache(pieces)
        packing = None if is_cut else packed_in_memory(cache, training.seq_len + 1)
        return CachedSource(entry, cache, packing=packing)
    numbered = IndexedDocuments(len(pieces), str)
    shards, window = training.stream_shards, training.shuffle_window
    return StreamedSource(entry, numbered, _Numbered(pieces), shards, window)


def first_cursor(sources: Sequence[OpenSource], training: Training) -> Cursor:
    """Return where the small job starts to read: so near the end of an epoch of a cache that the
    next one starts after the resume. A stream starts at its start.

    Args:
        sources: all of them cached or none; with the same share of each batch.
    """
    share, length = training.global_batch_size // len(sources), training.seq_len + 1
    sizes = [s.samples_per_epoch(length) for s in sources if isinstance(s, CachedSource)]
    if not sizes:
        return Cursor()
    begin = (min(sizes) // share - SAVED_STEP) * share
    return Cursor(begin * len(sources), (begin,) * len(sources))
