"""Sample i of the job: a function of the config and i, not of who reads it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from meshwright.config.job_config import JobConfig
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.excluded import ExcludedParts
from meshwright.datasets.order import Mixture
from meshwright.datasets.samples import Sample, SampleRules
from meshwright.datasets.shards import EndOfData, Shard, ShardPlace, StreamedSource
from meshwright.system.errors import RecordError
from meshwright.system.files import warn_once
from meshwright.system.log import logger

OpenSource = CachedSource | StreamedSource


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
    """The counts when the present weights started; (): at the first sample."""
    bad_records: int = 0
    """Records that were skipped in places that an earlier stage has left."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Cursor":
        """Undo `dataclasses.asdict` and JSON."""
        return TypeAdapter(cls).validate_python(value)


def bad_records(cursor: Cursor) -> int:
    """Return how many records were skipped in the shards that a cursor knows or has left."""
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
        excluded: parts of sources that the loss leaves out, by the source's name.
    """

    def __init__(
        self,
        sources: Sequence[OpenSource],
        cursor: Cursor,
        rules: SampleRules,
        *,
        batch: int,
        slots: Collection[int],
        excluded: Mapping[str, ExcludedParts] | None = None,
    ) -> None:
        self.rules, self._excluded = rules, excluded or {}
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
            what = f"{name} is streamed, and each of {times} ranks reads and tokenizes it"
            fix = 'set its dataset_mode = "cached" to tokenize it once'
            warn_once(f"{what} whole, in a mixture or with max_epochs; {fix}")

    @property
    def is_mixture(self) -> bool:
        """Whether there are several sources."""
        return len(self._sources) > 1

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
        logger.warning("skipped a record (%d): %s", so_far + 1, error)

    def next_sample(self) -> Sample | None:
        """Return the next sample; None if it isn't one of the slots.

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
        if sample is None or not is_asked_for:
            return None
        name = source.entry.name
        if excluded := self._excluded.get(name):
            sample = excluded.without_loss(sample, index, self._cached.get(name))
        return replace(sample, source=number) if number else sample

    def _is_read_here(self, shard: int, num_shards: int) -> bool:
        """Return whether any sample of a shard falls into one of this rank's slots: sample i is in
        slot i mod batch, and from shard i mod shards. In a mixture, sample i of the job isn't
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


class DrawnSample(NamedTuple):
    """A sample of a step, and where it comes from."""

    source: int
    """Number of its source."""
    number: int
    """Of the sample in its source, counted over all epochs."""
    sample: Sample


def draw_samples(
    sources: Sequence[OpenSource], before: Cursor, first: int, count: int, rules: SampleRules
) -> Iterator[DrawnSample]:
    """Yield `count` samples of the job from its sample `first` on, in their order.

    Args:
        before: a place at or before `first`.
    """
    since, mixture = mixture_at(before, sources)
    for _ in range(before.sample, first):
        mixture.draw()
    begins = [sum(pair) for pair in zip(since, mixture.counts, strict=True)]
    drawn, found = [mixture.draw() for _ in range(count)], list[Iterator[Sample]]()
    for number, begin in enumerate(begins):
        read, last = (before.counts or since)[number], begin + drawn.count(number) - 1
        found.append(find_samples(sources[number], begin, last, rules, (read, before)))
    for index, number in enumerate(drawn):
        place = begins[number] + drawn[:index].count(number)
        yield DrawnSample(number, place, next(found[number]))
