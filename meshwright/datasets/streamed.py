"""Samples of a source that is tokenised as it is read."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.datasets.opening import StreamedSource
from meshwright.datasets.order import permutation
from meshwright.datasets.rows import Item, Reader
from meshwright.datasets.samples import Sample, SampleRules, to_sample
from meshwright.system.errors import RecordError
from meshwright.system.files import RETRY_AFTER_S, may_pass
from meshwright.system.log import logger

PassOver = Callable[[RecordError], None]
"""Called with a record that is to be passed over; raises if it is not to be."""


class EndOfData(Exception):  # noqa: N818  an end like StopIteration, no error
    """A source has been read as often as it may be."""


@dataclass
class ShardPlace:
    """A place in one shard, for a resume. Only its window is read again."""

    epoch: int = 0
    window: int = 0
    """Number, in the epoch, of the window that the current document is in."""
    window_state: Any = None
    """Of the source, before that window."""
    document: int = 0
    """Number of the current document in the shuffled window."""
    used: int = 0
    """Tokens of it that have gone into samples."""
    bad_records: int = 0
    """Records before the current document that were passed over, in all epochs."""
    taken: int = 0
    """Documents before the window, in this epoch, that `max_documents` counts."""


class Shard:
    """One of the independent parts of a source: documents, shuffled window by window, end to end.

    A record that is passed over stands in its window as a document without tokens. So the stream is
    the same whoever reads it, and from whatever place.
    """

    def __init__(
        self,
        source: StreamedSource,
        number: int,
        rules: SampleRules,
        *,
        pass_over: PassOver,
        place: ShardPlace,
    ) -> None:
        self._source, self._number, self._rules = source, number, rules
        self._pass_over, self._at = pass_over, replace(place)
        self._has_documents = False
        self._reader: Reader | None = None
        most, shards = source.entry.source.max_documents, source.num_shards
        self._most = most // shards + (number < most % shards) if most else math.inf
        self._fill_window()
        self._tokens = self._encode()

    @property
    def place(self) -> ShardPlace:
        """Where the next sample begins."""
        return replace(self._at)

    def next_sample(self) -> Sample:
        """Return the next `length` tokens.

        Raises:
            EndOfData: if they would go beyond the last epoch.
            ConfigError: if there are none in a whole epoch.
        """
        pieces: list[npt.NDArray[np.unsignedinteger]] = []
        at, missing, first_epoch = self._at, self._rules.length, self._at.epoch
        while missing:
            piece = self._tokens[at.used : at.used + missing]
            if len(piece):
                pieces.append(piece)
            at.used += len(piece)
            missing -= len(piece)
            if missing:
                self._next_document()
                if at.epoch > first_epoch + 1:  # the whole epoch between went in
                    raise self._source.entry.error(
                        "dataset",
                        f"one of {self._source.num_shards} shards of it holds less than one sample "
                        f"of {self._rules.length} tokens",
                        "lower training.stream_shards or training.seq_len, or add data",
                    )
        return to_sample(pieces)

    def _next_document(self) -> None:
        at = self._at
        at.bad_records += self._is_bad
        at.document, at.used = at.document + 1, 0
        if at.document >= len(self._shuffled):
            at.document, at.window, at.taken = 0, at.window + 1, at.taken + _count(self._shuffled)
            self._fill_window()
            if not self._shuffled:
                self._begin_epoch()
        self._tokens = self._encode()

    def _begin_epoch(self) -> None:
        if not self._has_documents:
            raise self._source.entry.error("dataset", "holds no text in one of its shards")
        at, self._reader = self._at, None
        at.epoch, at.window, at.window_state, at.taken = at.epoch + 1, 0, None, 0
        if at.epoch == self._rules.max_epochs:
            raise EndOfData
        self._fill_window()

    def _fill_window(self) -> None:
        documents, at = self._read_window(), self._at
        key = (self._rules.seed or 0, at.epoch, self._number, at.window)
        order = permutation(len(documents), *key)
        self._shuffled = [documents[index] for index in order]
        self._has_documents = self._has_documents or bool(documents)

    def _read_window(self) -> list[Item]:
        """Return the documents of the next window, read again from its beginning if that may
        help."""
        source = self._source
        for wait_s in (*RETRY_AFTER_S, None):
            try:
                return self._try_window()
            except Exception as error:  # whatever a file system or a network client raises
                self._reader = None
                if wait_s is None or not may_pass(error):
                    raise
                logger.warning(
                    "%s: shard %d of %d cannot be read: %s; trying again in %g s",
                    *(source.entry.name, self._number, source.num_shards, error, wait_s),
                )
                time.sleep(wait_s)
        raise AssertionError

    def _try_window(self) -> list[Item]:
        if self._reader is None:
            self._reader = self._source.documents.read(
                self._number, self._source.num_shards, self._at.window_state
            )
        self._at.window_state = self._reader.state
        documents, taken = list[Item](), self._at.taken
        while len(documents) < self._source.window and taken < self._most:
            try:
                documents.append(next(self._reader))
            except StopIteration:
                break
            taken += _count(documents[-1:])
        return documents

    def _encode(self) -> npt.NDArray[np.uint32]:
        self._is_bad = False
        if not self._shuffled:  # a shard without a document
            return np.empty(0, np.uint32)
        found = self._shuffled[self._at.document]
        try:
            if isinstance(found, RecordError):
                raise found
            return self._source.encoder.encode(found)
        except RecordError as error:
            self._pass_over(error)
            self._is_bad = True
            return np.empty(0, np.uint32)


def _count(items: Sequence[Item]) -> int:
    """Return how many are documents; an empty text is none."""
    return sum(bool(item) and not isinstance(item, RecordError) for item in items)
