"""Documents and samples that `training.exclude` leaves out of the loss; their places stay."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.samples import CachedSamples, Sample
from meshwright.datasets.shards import StreamedSource
from meshwright.system.errors import check

KEY = "training.exclude"

PART = re.compile(r"(?P<name>.+) (?P<kind>document|sample) (?P<first>\d+)(-(?P<last>\d+))?")


@dataclass
class ExcludedParts:
    """The parts of a source without loss."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of documents in a cache."""
    samples: list[range] = field(default_factory=list)
    """Numbers in the source, counted over all epochs."""

    def without_loss(self, sample: Sample, number: int, samples: CachedSamples | None) -> Sample:
        """Return a sample whose tokens are no targets where they are excluded.

        Args:
            number: of the sample in its source.
            samples: of a cached source.
        """
        if any(number in numbers for numbers in self.samples):
            return replace(sample, raw=sample.raw.astype(np.uint32) | np.uint32(NO_LOSS))
        raw, pieces = sample.raw, samples.ranges(number) if samples is not None else []
        places = pairwise([0, *accumulate(end - begin for begin, end in pieces)])
        for (begin, end), (place, _) in zip(pieces, places, strict=True):
            for first, last in self.tokens:
                if (start := max(begin, first)) < (stop := min(end, last)):
                    raw = raw.astype(np.uint32)  # a copy, with room for the mark
                    raw[place + start - begin : place + stop - begin] |= np.uint32(NO_LOSS)
        return replace(sample, raw=raw)


def find_excluded(
    exclude: Sequence[str],
    sources: Sequence[CachedSource | StreamedSource],
    *,
    are_all: bool = False,
) -> dict[str, ExcludedParts]:
    """Return what `training.exclude` names, by source.

    Args:
        are_all: no other source, such as one of a later stage, may have the name.

    Raises:
        ConfigError: if an entry can't be read, or names nothing.
    """
    found = defaultdict[str, ExcludedParts](ExcludedParts)
    by_name = {one.entry.name: one for one in sources}
    for index, text in enumerate(exclude):
        key = f"{KEY}.{index}"
        rule = "must be the name of a source, then document or sample, then numbers"
        fix = 'write it like "json document 137" or "json sample 848-863"'
        part = PART.fullmatch(text)
        check(part is not None, key, text, rule, fix)
        assert part is not None
        source = by_name.get(part["name"])
        if source is None:
            fix = f"name one of {', '.join(by_name)}"
            check(not are_all, key, text, f"no source is called {part['name']}", fix)
            continue
        numbers = range(int(part["first"]), int(part["last"] or part["first"]) + 1)
        check(bool(numbers), key, text, "the last number is before the first", "exchange them")
        if part["kind"] == "sample":
            found[part["name"]].samples.append(numbers)
            continue
        rule, fix = "is streamed, so its documents have no numbers", "name samples"
        is_cached = isinstance(source, CachedSource)
        check(is_cached, key, text, rule, f"{fix}: meshwright replay tells which")
        assert isinstance(source, CachedSource)
        count = source.cache.num_documents
        rule = f"the source has {count:,} documents, from 0 on"
        check(numbers[-1] < count, key, text, rule, "name others")
        ends = source.cache.document(numbers[0]).begin, source.cache.document(numbers[-1]).end
        found[part["name"]].tokens.append(ends)
    return dict(found)
