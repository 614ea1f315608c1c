"""A source whose tokens are in a cache, with the samples that are made of them."""

from dataclasses import dataclass, field

from meshwright.datasets.files import SourceEntry
from meshwright.datasets.identity import SourceFacts
from meshwright.datasets.packing import PackedSamples, Packing
from meshwright.datasets.samples import CachedSamples, SampleRules
from meshwright.datasets.token_cache.cache import TokenCache


@dataclass(frozen=True)
class CachedSource:
    """A source in a token cache: any sample of it can be read."""

    entry: SourceEntry
    cache: TokenCache
    facts: SourceFacts = field(default_factory=SourceFacts)
    packing: Packing | None = None
    """None: documents are laid end to end."""

    @property
    def content(self) -> str:
        """Equal where all its samples are."""
        return self.cache.content

    def samples_per_epoch(self, length: int) -> int:
        """Return how many samples of `length` tokens an epoch has; length includes the label."""
        return self.samples(SampleRules(length, seed=None)).samples_per_epoch

    def samples(self, rules: SampleRules) -> CachedSamples:
        """Return its samples, packed if it is."""
        if self.packing is not None:
            return PackedSamples(self.cache, self.packing, rules.seed)
        return CachedSamples(self.cache, rules.length, rules.seed)
