"""Any sample of a source by its index, to look at."""

from collections.abc import Iterator

from meshwright.datasets.cached_samples import CachedSamples
from meshwright.datasets.global_order import Cursor
from meshwright.datasets.opening import CachedSource, OpenSource
from meshwright.datasets.sample import Sample
from meshwright.datasets.streamed_samples import ShardPlace, StreamedSamples


def find_samples(
    source: OpenSource,
    first: int,
    last: int,
    *,
    length: int,
    seed: int,
    before: tuple[int, Cursor],
) -> Iterator[Sample]:
    """Samples `first` to `last` of `source`, as the job reads them; counted over all epochs.

    Samples of a cached source are read at once. Of a streamed one, the shards that hold them are
    read from `before` on.

    Args:
        length: tokens of a sample.
        seed: of every shuffle.
        before: how many samples of the source, at most `first`, had been read at some place, and
            that place; (0, Cursor()) is the start.
    """
    if isinstance(source, CachedSource):
        cached = CachedSamples(source.cache, length, seed)
        yield from (cached.read(index) for index in range(first, last + 1))
        return
    count, cursor = before
    places: dict[int, ShardPlace] = dict(cursor.places.get(source.entry.name, {}))
    streamed = StreamedSamples(
        source.entry,
        source.documents,
        source.encoder,
        num_shards=source.num_shards,
        length=length,
        window=source.window,
        seed=seed,
        max_epochs=0,
        pass_over=lambda error: None,  # the job has decided that
        places=places,
    )
    # sample i is the next one of shard i modulo their number
    wanted = {index % source.num_shards for index in range(first, last + 1)}
    for index in range(count, last + 1):
        if index % source.num_shards in wanted:
            sample = streamed.read(index % source.num_shards)
            if index >= first:
                yield sample
