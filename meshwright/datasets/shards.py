"""A source that is streamed: tokenized as it is read, in independent parts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import Encoder
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.identity import SourceFacts
from meshwright.datasets.order import permutation
from meshwright.datasets.rows import Documents, Item, Reader
from meshwright.datasets.samples import Sample, SampleRules, to_sample
from meshwright.system.errors import ConfigError, RecordError, first_line
from meshwright.system.files import warn_once
from meshwright.system.log import logger
from meshwright.system.retries import ABSENT, may_pass, read_patiently

PassOver = Callable[[RecordError], None]
"""Called with a record that is to be skipped; raises if it isn't to be."""


class EndOfData(Exception):  # noqa: N818  an end like StopIteration, no error
    """A source has been read as often as it may be."""


@dataclass(frozen=True)
class StreamedSource:
    """A source that is read in the order of its shards."""

    entry: SourceEntry
    documents: Documents
    encoder: Encoder
    num_shards: int
    window: int
    """Documents that are shuffled together."""
    facts: SourceFacts = field(default_factory=SourceFacts)

    @property
    def unused(self) -> set[str]:
        """Columns of rows, and keys of messages, that have been read so far and aren't used."""
        return {*self.documents.unused, *self.encoder.unread}

    @property
    def content(self) -> str:
        """Equal where all its samples are, as far as is known without reading all of it."""
        shards = f"{self.num_shards} shards, {self.window} documents a window"
        return f"{shards}, {self.facts.documents}"


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
    """Records before the current document that were skipped, in all epochs."""
    taken: int = 0
    """Documents before the window, in this epoch, that `max_documents` counts."""


class Shard:
    """One of the independent parts of a source: documents, shuffled window by window, end to end.

    A record that is skipped stands in its window as a document without tokens. So the stream is
    the same whoever reads it, and from whatever place.
    """

    def __init__(
        self,
        source: StreamedSource,
        number: int,
        *,
        rules: SampleRules,
        pass_over: PassOver,
        place: ShardPlace,
    ) -> None:
        self._source, self._number, self._rules = source, number, rules
        self._pass_over, self._at = pass_over, replace(place)
        self._reader: Reader | None = None
        most, shards = source.entry.source.max_documents, source.num_shards
        self._most = most // shards + (number < most % shards) if most else math.inf
        self._documents = self._encoded()
        self._tokens: npt.NDArray[np.uint32] | None = None  # nothing is read before a sample is

    @property
    def place(self) -> ShardPlace:
        """Where the next sample starts."""
        return replace(self._at)

    def next_sample(self) -> Sample:
        """Return the next `length` tokens.

        Raises:
            EndOfData: if they would go beyond the last epoch.
            ConfigError: if there are none in a whole epoch.
        """
        pieces: list[npt.NDArray[np.unsignedinteger]] = []
        names = list[str]()
        at, missing, first_epoch = self._at, self._rules.length, self._at.epoch
        if self._tokens is None:
            self._tokens = next(self._documents)
        while missing:
            piece = self._tokens[at.used : at.used + missing]
            if len(piece):
                pieces.append(piece)
                place = f"epoch {at.epoch}, window {at.window}, document {at.document}"
                names.append(f"shard {self._number}, {place}")
            at.used += len(piece)
            missing -= len(piece)
            if missing:
                self._tokens = next(self._documents)
                if at.epoch > first_epoch + 1:  # the whole epoch between went in
                    raise _too_short(self._source, self._rules.length)
        return replace(to_sample(pieces), streamed_from=names)

    def _encoded(self) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the tokens of the documents, of all epochs, from the place on; and move it."""
        at, has_documents = self._at, False
        while True:
            while window := self._read_window():
                has_documents = True
                key = (self._rules.seed or 0, at.epoch, self._number, at.window)
                shuffled = [window[index] for index in permutation(len(window), *key)]
                for number in range(at.document, len(shuffled)):
                    at.document, tokens = number, self._encode(shuffled[number])
                    yield np.empty(0, np.uint32) if tokens is None else tokens
                    at.used = 0
                    at.bad_records += tokens is None
                at.document, at.window, at.taken = 0, at.window + 1, at.taken + _count(window)
                for name in sorted(self._source.unused):
                    warn_once(f"{self._source.entry.name}: {name!r} of its rows is not used")
                if line := self._source.encoder.new_loss_line():
                    logger.warning("%s: so far, %s", self._source.entry.name, line)
            if not has_documents:
                fix = "lower training.stream_shards, so that each has some"
                raise self._source.entry.error("dataset", "holds no text in one of its shards", fix)
            self._reader = None
            at.epoch, at.window, at.window_state, at.taken = at.epoch + 1, 0, None, 0
            if at.epoch == self._rules.max_epochs:
                raise EndOfData

    def _encode(self, document: Item) -> npt.NDArray[np.uint32] | None:
        """Return the tokens of a document; None of a record that is skipped."""
        try:
            if isinstance(document, RecordError):
                raise document
            return self._source.encoder.encode(document)
        except RecordError as error:
            self._pass_over(error)
            return None

    def _read_window(self) -> list[Item]:
        """Return the documents of the next window, none at the end of the epoch; read again from
        its start if that may help."""
        source, number, at = self._source, self._number, self._at

        def read() -> list[Item]:
            try:
                if self._reader is None:
                    shard = number, source.num_shards, at.window_state
                    self._reader = source.documents.read(*shard)
                at.window_state = self._reader.state()
                items, taken = list[Item](), at.taken
                while len(items) < source.window and taken < self._most:
                    item = next(self._reader, None)
                    if item is None:
                        break
                    items.append(item)
                    taken += _count([item])
                return items
            except Exception as error:
                self._reader = None
                if isinstance(error, ABSENT) and may_pass(error):  # of a hub that doesn't answer
                    raise ConnectionError(first_line(error)) from error
                raise

        return read_patiently(f"{source.entry.name}: shard {number} of {source.num_shards}", read)


def check_shards(source: StreamedSource, length: int) -> None:
    """Read a sample of each shard, so that a job doesn't find out later.

    Args:
        source: for this only, as what is read is counted.
        length: of a sample, in tokens.

    Raises:
        ConfigError: if a shard holds less than one sample, or no good record.
    """
    # no longer window is read than a sample takes
    source, rules = replace(source, window=1), SampleRules(length, seed=None, max_epochs=1)
    for number in range(source.num_shards):
        bad, place = list[RecordError](), ShardPlace()
        shard = Shard(source, number, rules=rules, pass_over=bad.append, place=place)
        try:
            shard.next_sample()
        except EndOfData:
            raise bad[0] if bad else _too_short(source, length) from None


def _too_short(source: StreamedSource, length: int) -> ConfigError:
    what = f"one of {source.num_shards} shards of it holds less than one sample of {length} tokens"
    fix = "lower training.stream_shards or training.seq_len, or add data"
    return source.entry.error("dataset", what, fix)


def _count(items: Sequence[Item]) -> int:
    """Return how many are documents; an empty text is none."""
    return sum(bool(item) and not isinstance(item, RecordError) for item in items)
