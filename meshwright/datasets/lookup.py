"""Any sample of a source by its index, to look at: `scripts/show_samples.py`."""

from collections.abc import Iterator

from meshwright.datasets.cached_samples import CachedSamples
from meshwright.datasets.opening import CachedSource, OpenSource
from meshwright.datasets.sample import Sample, SampleRules
from meshwright.datasets.sample_stream import Cursor
from meshwright.datasets.streamed_samples import ShardPlace, StreamedSamples


def find_samples(
    source: OpenSource, first: int, last: int, rules: SampleRules, before: tuple[int, Cursor]
) -> Iterator[Sample]:
    """Samples `first` to `last` of `source`, as the job reads them; counted over all epochs.

    Samples of a cached source are read at once. Of a streamed one, the shards that hold them are
    read from `before` on.

    Args:
        before: how many samples of the source, at most `first`, had been read at some place, and
            that place; (0, Cursor()) is the start.
    """
    if isinstance(source, CachedSource):
        cached = CachedSamples(source.cache, rules.length, rules.seed)
        yield from (cached.read(index) for index in range(first, last + 1))
        return
    count, cursor = before
    places: dict[int, ShardPlace] = dict(cursor.places.get(source.entry.name, {}))
    # of bad records, the job has decided already
    streamed = StreamedSamples(source, rules, pass_over=lambda error: None, places=places)
    # sample i is the next one of shard i modulo their number
    wanted = {index % source.num_shards for index in range(first, last + 1)}
    for index in range(count, last + 1):
        if index % source.num_shards in wanted:
            sample = streamed.read(index % source.num_shards)
            if index >= first:
                yield sample
