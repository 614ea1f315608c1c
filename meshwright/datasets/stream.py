"""Sample i of the job: a function of the config and i, not of who reads it. A source that is
streamed is tokenised here, as it is read."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from meshwright.config.job_config import JobConfig
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.files import Entry
from meshwright.datasets.order import Mixture, permutation
from meshwright.datasets.rows import Documents, Item, Reader
from meshwright.datasets.samples import CachedSource, Sample, SampleRules, to_sample
from meshwright.system.errors import RecordError, first_line
from meshwright.system.files import ABSENT, may_pass, read_patiently, warn_once
from meshwright.system.log import logger

PassOver = Callable[[RecordError], None]
"""Called with a record that is to be passed over; raises if it is not to be."""


class EndOfData(Exception):  # noqa: N818  an end like StopIteration, no error
    """A source has been read as often as it may be."""


@dataclass(frozen=True)
class StreamedSource:
    """A source that is read in the order of its shards."""

    entry: Entry
    documents: Documents
    encoder: Encoder
    num_shards: int
    window: int
    """Documents that are shuffled together."""
    documents_hash: str = ""
    """Hashes of its settings with the names and sizes of its files; of a little of their content;
    and of the user's code, the tokenizer and the chat template that make its tokens."""
    commit: str = ""
    """Of a dataset of the Hub."""

    @property
    def unused(self) -> set[str]:
        """Columns of rows, and keys of messages, that have been read so far and are not used."""
        return {*self.documents.unused, *self.encoder.unread}

    @property
    def content(self) -> str:
        """Equal where all its samples are, as far as is known without reading all of it."""
        shards = f"{self.num_shards} shards, {self.window} documents a window"
        return f"{shards}, {self.documents_hash}"


OpenSource = CachedSource | StreamedSource


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
        if self._tokens is None:
            self._tokens = next(self._documents)
        while missing:
            piece = self._tokens[at.used : at.used + missing]
            if len(piece):
                pieces.append(piece)
            at.used += len(piece)
            missing -= len(piece)
            if missing:
                self._tokens = next(self._documents)
                if at.epoch > first_epoch + 1:  # the whole epoch between went in
                    raise self._source.entry.error(
                        "dataset",
                        f"one of {self._source.num_shards} shards of it holds less than one sample "
                        f"of {self._rules.length} tokens",
                        "lower training.stream_shards or training.seq_len, or add data",
                    )
        return to_sample(pieces)

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
        """Return the tokens of a document; None of a record that is passed over."""
        try:
            if isinstance(document, RecordError):
                raise document
            return self._source.encoder.encode(document)
        except RecordError as error:
            self._pass_over(error)
            return None

    def _read_window(self) -> list[Item]:
        """Return the documents of the next window, none at the end of the epoch; read again from
        its beginning if that may help."""
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
                if isinstance(error, ABSENT) and may_pass(error):  # of a hub that does not answer
                    raise ConnectionError(first_line(error)) from error
                raise

        return read_patiently(f"{source.entry.name}: shard {number} of {source.num_shards}", read)


def _count(items: Sequence[Item]) -> int:
    """Return how many are documents; an empty text is none."""
    return sum(bool(item) and not isinstance(item, RecordError) for item in items)


@dataclass(frozen=True)
class Cursor:
    """A place in the order of samples; enough for a resume on any mesh."""

    sample: int = 0
    """Samples before it."""
    counts: tuple[int, ...] = ()
    """Of those, how many came from each source."""
    places: Mapping[str, Mapping[int, ShardPlace]] = field(default_factory=dict)
    """By name of a streamed source: positions in the shards that have been read."""
    weighted_from: tuple[int, ...] = ()
    """The counts when the present weights began; (): at the first sample."""
    bad_records: int = 0
    """Records that were passed over in places that an earlier stage has left."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Cursor":
        """Undo `dataclasses.asdict` and JSON."""
        return TypeAdapter(cls).validate_python(value)


def bad_records(cursor: Cursor) -> int:
    """Return how many records were passed over in the shards that a cursor knows or has left."""
    places = (place for shards in cursor.places.values() for place in shards.values())
    return cursor.bad_records + sum(place.bad_records for place in places)


def merged(cursors: Sequence[Cursor]) -> Cursor:
    """Merge the ranks' cursors, each of which knows only the shards that it reads."""
    first = cursors[0]
    places = {
        name: {number: place for cursor in cursors for number, place in cursor.places[name].items()}
        for name in first.places
    }
    return replace(first, places=places)


def mixture_at(cursor: Cursor, sources: Sequence[OpenSource]) -> tuple[tuple[int, ...], Mixture]:
    """Return how many samples came from each source before the present weights, and the mixture
    that has drawn the samples between those and the cursor."""
    before = cursor.weighted_from or (0,) * len(sources)
    counts = cursor.counts or before
    drawn = [count - start for count, start in zip(counts, before, strict=True)]
    return before, Mixture([source.entry.weight for source in sources], drawn)


class SampleStream:
    """The samples of all sources, one after the other, from a cursor on.

    Args:
        batch: samples of a global batch.
        slots: which of them, by number, are asked for; others are only stepped over.
    """

    def __init__(
        self,
        sources: Sequence[OpenSource],
        cursor: Cursor,
        rules: SampleRules,
        *,
        batch: int,
        slots: Collection[int],
    ) -> None:
        self.rules = rules
        self._sample, self._start = cursor.sample, cursor
        self._before, self._mixture = mixture_at(cursor, sources)
        self.batch, self.slots = batch, slots
        self._sources = sources
        self._cached = {
            source.entry.name: source.samples(rules)
            for source in sources
            if isinstance(source, CachedSource)
        }
        self._reads_all = len(sources) > 1 or rules.max_epochs > 0
        self._open = partial(Shard, rules=rules, pass_over=self._pass_over)
        self._shards = {
            source.entry.name: {
                number: self._open(source, number, place=place)
                for number, place in cursor.places.get(source.entry.name, {}).items()
                if self._is_read_here(number, source.num_shards)  # other ranks' places are stale
            }
            for source in sources
            if isinstance(source, StreamedSource)
        }
        for name in self._shards if self._reads_all and len(self.slots) < batch else ():
            times = batch // max(len(self.slots), 1)
            what = f"{name} is streamed, and each of {times} ranks reads and tokenises it"
            fix = 'set its dataset_mode = "cached" to tokenise it once'
            warn_once(f"{what} whole, in a mixture or with max_epochs; {fix}")

    @property
    def names(self) -> str:
        """Of the sources."""
        return ", ".join(source.entry.name for source in self._sources)

    @property
    def cursor(self) -> Cursor:
        """Where the next sample is; of streamed sources, the shards that are read here."""
        places = {
            name: {number: shard.place for number, shard in shards.items()}
            for name, shards in self._shards.items()
        }
        counts = tuple(self._counts)
        return replace(self._start, sample=self._sample, counts=counts, places=places)

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been read; of a streamed one, whole times of its shards that
        are read here, on average."""
        counts = dict[str, float]()
        for source, count in zip(self._sources, self._counts, strict=True):
            name = source.entry.name
            if name in self._cached:
                counts[name] = count / self._cached[name].samples_per_epoch
            else:
                of_each = [shard.place.epoch for shard in self._shards[name].values()]
                counts[name] = sum(of_each) / max(len(of_each), 1)
        return counts

    @property
    def _counts(self) -> list[int]:
        """How many samples came from each source."""
        return [a + b for a, b in zip(self._before, self._mixture.counts, strict=True)]

    def _pass_over(self, error: RecordError) -> None:
        """Log the record; or raise, if there were as many before as there may be."""
        so_far = bad_records(self.cursor)
        if so_far >= self.rules.max_bad_records:
            raise error
        logger.warning("passed over a record (%d): %s", so_far + 1, error)

    def next_sample(self) -> Sample | None:
        """Return the next sample; None if it is not one of the slots.

        Raises:
            EndOfData: if its source has been read `max_epochs` times.
        """
        is_asked_for = self._sample % self.batch in self.slots
        number = self._mixture.draw()
        index = self._before[number] + self._mixture.counts[number] - 1
        source, sample = self._sources[number], None
        if isinstance(source, CachedSource):
            samples, most = self._cached[source.entry.name], self.rules.max_epochs
            if most and index >= most * samples.samples_per_epoch:
                raise EndOfData
            sample = samples.read(index) if is_asked_for else None
        elif self._is_read_here(index % source.num_shards, source.num_shards):
            shards, shard = self._shards[source.entry.name], index % source.num_shards
            if shard not in shards:
                shards[shard] = self._open(source, shard, place=ShardPlace())
            sample = shards[shard].next_sample()
        self._sample += 1
        return sample if is_asked_for else None

    def _is_read_here(self, shard: int, num_shards: int) -> bool:
        """Return whether any sample of a shard falls into one of this rank's slots: sample i is in
        slot i mod batch, and from shard i mod shards. In a mixture, sample i of the job is not
        sample i of its source. With `max_epochs`, all ranks reach the end at the same sample."""
        common = math.gcd(self.batch, num_shards)
        return self._reads_all or any(slot % common == shard % common for slot in self.slots)


def steps_of_data(
    config: JobConfig, sources: Sequence[OpenSource], step: int = 0, cursor: Cursor = Cursor()
) -> int:
    """Return the last step that `training.max_epochs` leaves data for; 0: no limit, or a source is
    streamed. Of a mixture it may be a few more: a source may have given a sample less than its
    share.

    Args:
        step: the last one before `cursor`, where the job resumes, maybe in other data.
    """
    training, most = config.training, 0
    if not training.max_epochs:
        return 0
    shares = [Fraction(str(source.entry.weight)) for source in sources]
    before = cursor.weighted_from or (0,) * len(sources)
    behind = int(len(sources) > 1)
    for source, share, taken in zip(sources, shares, before, strict=True):
        if not isinstance(source, CachedSource):
            return 0
        count = training.max_epochs * source.samples_per_epoch(training.seq_len + 1) - taken
        samples = sum(before) + math.ceil((count + behind) * sum(shares) / share) - behind
        most = min(most, samples) if most else samples
    return step + max(most - cursor.sample, 0) // training.global_batch_size


def find_samples(
    source: OpenSource, first: int, last: int, rules: SampleRules, before: tuple[int, Cursor]
) -> Iterator[Sample]:
    """Yield samples `first` to `last` of `source`, counted over all epochs. A streamed one is read
    from `before` on: how many samples of it, at most `first`, had been read at a place."""
    count, cursor = (first, Cursor()) if isinstance(source, CachedSource) else before
    start, wanted = Cursor(count, (count,), cursor.places), range(first, last + 1)
    # a batch that no sample ends, and a multiple of the shards: only these are told apart
    size = (1 if isinstance(source, CachedSource) else source.num_shards) << 40
    stream = SampleStream([source], start, rules, batch=size, slots=wanted)
    for _ in range(count, last + 1):
        if (sample := stream.next_sample()) is not None:
            yield sample
