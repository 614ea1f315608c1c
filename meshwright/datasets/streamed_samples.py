"""Samples of a source that is tokenised as it is read."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import Encoder
from meshwright.datasets.entry import Document, Entry
from meshwright.datasets.order import permutation
from meshwright.datasets.sample import Sample, to_sample
from meshwright.datasets.sources import Documents


class EndOfData(Exception):  # noqa: N818  an end like StopIteration, no error
    """A source has been read as often as it may be."""


@dataclass(frozen=True)
class ShardPlace:
    """A place in one shard: what a resume needs. Its window is read again, and no more."""

    epoch: int = 0
    window: int = 0
    """Number, in the epoch, of the window that the current document is in."""
    window_state: Any = None
    """Of the source, before that window."""
    document: int = 0
    """Number of the current document in the shuffled window."""
    used: int = 0
    """Tokens of it that have gone into samples."""


class Shard:
    """One of the independent parts of a source: documents, shuffled window by window, end to end.

    Args:
        length: tokens of a sample.
        window: documents that are shuffled together.
        max_epochs: times that it may be read; 0: no limit.
    """

    def __init__(
        self,
        entry: Entry,
        documents: Documents,
        encoder: Encoder,
        number: int,
        *,
        num_shards: int,
        length: int,
        window: int,
        seed: int,
        max_epochs: int,
        place: ShardPlace,
    ) -> None:
        self._entry, self._documents, self._encoder = entry, documents, encoder
        self._number, self._num_shards = number, num_shards
        self._length, self._window, self._seed = length, window, seed
        self._max_epochs, self._has_documents = max_epochs, False
        self._reader = documents.read(number, num_shards, place.window_state)
        self._epoch, self._window_number = place.epoch, place.window
        self._fill_window()
        self._document, self._used = place.document, place.used
        self._tokens = self._encode(place.document)

    @property
    def place(self) -> ShardPlace:
        """Where the next sample begins."""
        return ShardPlace(
            self._epoch, self._window_number, self._window_state, self._document, self._used
        )

    def next_sample(self) -> Sample:
        """The next `length` tokens.

        Raises:
            EndOfData: if they would go beyond the last epoch.
            ConfigError: if there are none in a whole epoch.
        """
        pieces: list[npt.NDArray[np.unsignedinteger]] = []
        missing, first_epoch = self._length, self._epoch
        while missing:
            piece = self._tokens[self._used : self._used + missing]
            if len(piece):
                pieces.append(piece)
            self._used += len(piece)
            missing -= len(piece)
            if missing:
                self._next_document()
                if self._epoch > first_epoch + 1:  # the whole epoch between went in
                    raise self._entry.error(
                        "dataset",
                        f"one of {self._num_shards} shards of it holds less than one sample of "
                        f"{self._length} tokens",
                        "lower training.stream_shards or training.seq_len, or add data",
                    )
        return to_sample(pieces)

    def _next_document(self) -> None:
        self._document, self._used = self._document + 1, 0
        if self._document >= len(self._shuffled):
            self._document, self._window_number = 0, self._window_number + 1
            self._fill_window()
            if not self._shuffled:
                self._begin_epoch()
        self._tokens = self._encode(self._document)

    def _begin_epoch(self) -> None:
        if not self._has_documents:
            raise self._entry.error("dataset", "holds no text in one of its shards")
        self._epoch, self._window_number = self._epoch + 1, 0
        if self._epoch == self._max_epochs:
            raise EndOfData
        self._reader = self._documents.read(self._number, self._num_shards)
        self._fill_window()

    def _fill_window(self) -> None:
        self._window_state = self._reader.state
        documents = list(itertools.islice(self._reader, self._window))
        order = permutation(
            len(documents), self._seed, self._epoch, self._number, self._window_number
        )
        self._shuffled: list[Document] = [documents[index] for index in order]
        self._has_documents = self._has_documents or bool(documents)

    def _encode(self, document: int) -> npt.NDArray[np.uint32]:
        if not self._shuffled:  # a shard without a document
            return np.empty(0, np.uint32)
        return self._encoder.encode(self._shuffled[document])


class StreamedSamples:
    """The shards of a source, of which each rank opens those that it reads.

    Args:
        places: of shards that have been read from.
    """

    def __init__(
        self,
        entry: Entry,
        documents: Documents,
        encoder: Encoder,
        *,
        num_shards: int,
        length: int,
        window: int,
        seed: int,
        max_epochs: int,
        places: dict[int, ShardPlace],
    ) -> None:
        self.num_shards = num_shards
        self._open = functools.partial(
            Shard,
            entry,
            documents,
            encoder,
            num_shards=num_shards,
            length=length,
            window=window,
            seed=seed,
            max_epochs=max_epochs,
        )
        self._places = places
        self._shards: dict[int, Shard] = {}

    def read(self, number: int) -> Sample:
        """The next sample of one shard."""
        if number not in self._shards:
            self._shards[number] = self._open(number, place=self._places.get(number, ShardPlace()))
        return self._shards[number].next_sample()

    @property
    def epochs(self) -> float:
        """How often the shards that are read here have been read, on average."""
        return sum(shard.place.epoch for shard in self._shards.values()) / max(len(self._shards), 1)

    @property
    def places(self) -> dict[int, ShardPlace]:
        """Of the shards that were read from, here or before."""
        return self._places | {number: shard.place for number, shard in self._shards.items()}
