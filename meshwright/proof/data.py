"""Data that shows mistakes: short documents of every id, with labels missing here and there.

Real text hides them. Its first batches hold few ids, no document ends inside a sample, and every
token counts, so that ranks never differ in their number of labels.
"""

import zlib
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from meshwright.config.job_config import Source, Training
from meshwright.datasets.documents import IndexedDocuments
from meshwright.datasets.encoding import NO_LOSS, Encoder, Tokens
from meshwright.datasets.entry import Entry
from meshwright.datasets.opening import CachedSource, OpenSource, StreamedSource
from meshwright.datasets.token_cache import BLOCK_DOCUMENTS, TokenCache
from meshwright.datasets.tokenizers.kinds import ByteTokenizer

NUM_DOCUMENTS = 1500
"""More than one block of a cache."""
SHORTEST, LONGEST = 3, 20
"""Tokens of a document."""
MISSING = (0.0, 0.0, 0.5, 1.0)
"""Share of a document's tokens that are no labels; each document draws one of these."""


@lru_cache(maxsize=8)  # a rank has one case after another, and most have the same data
def documents(vocab_size: int, seed: int) -> list[Tokens]:
    """uint32 ids from the whole vocabulary, some with `NO_LOSS`.

    The next id is mostly the last one plus a number that the document keeps: attention within a
    document has something to learn, and from other documents it would learn something else.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_DOCUMENTS):
        length = random.integers(SHORTEST, LONGEST + 1)
        ids = random.integers(vocab_size) + random.integers(1, 8) * np.arange(length)
        ids = np.where(random.random(length) < 0.2, random.integers(vocab_size, size=length), ids)
        is_missing = random.random(length) < random.choice(MISSING)
        found.append((ids % vocab_size + NO_LOSS * is_missing).astype(np.uint32))
    return found


class MemoryCache(TokenCache):
    """A token cache that lies in memory: nothing is tokenised, and every rank makes the same."""

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


def open_source(training: Training, vocab_size: int, seed: int) -> OpenSource:
    """Documents in memory, streamed or not as `training` says."""
    entry = Entry("training", "synthetic", Source())
    pieces = documents(vocab_size, seed)
    if training.dataset_mode != "streamed":
        return CachedSource(entry, MemoryCache(pieces))
    numbered = IndexedDocuments(len(pieces), str)
    shards, window = training.stream_shards, training.shuffle_window
    return StreamedSource(entry, numbered, _Numbered(pieces), shards, window, outline="")
