"""The sources that a config names. Free of torch and numpy."""

from collections.abc import Sequence

from meshwright.config.job_config import Source, Training, Validation, WeightedSource
from meshwright.datasets import find_dataset
from meshwright.datasets.entry import Entry


def entries(section: Training | Validation, key: str) -> list[Entry]:
    """Return the sources of `[key]`: those in its list, or the one that it is itself."""
    named = list(section.datasets)
    if not named:
        return [Entry(key, section.dataset, _source(section))]
    return [
        Entry(f"{key}.datasets.{number}", source.name or source.dataset, _source(source))
        for number, source in enumerate(named)
    ]


def _source(keys: Source) -> Source:
    """Only the keys that say where text comes from."""
    return Source.model_validate({name: getattr(keys, name) for name in Source.model_fields})


def weights(sources: Sequence[WeightedSource]) -> list[float]:
    """Return the weights of a mixture; [1] for a single source."""
    return [source.weight or source.tokens or 1 for source in sources] or [1]


def is_streamed(entry: Entry) -> bool:
    """Return whether its tokens are not kept."""
    spec = find_dataset(entry.source.dataset)
    assert spec is not None
    mode = entry.source.dataset_mode
    return spec.is_large if mode == "auto" else mode == "streamed"
