"""The first document in which the data of two runs differ, and the step that reads it.

Caches are compared by their checksums, one for 64 KiB of tokens and one for 1024 lengths, so only
the piece that differs is read. Samples are read of a few steps at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.commands.replay.recorded import RecordedRun
from meshwright.commands.replay.samples import place_of
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import SampleRules
from meshwright.metrics.report.run import Row
from meshwright.system.errors import ConfigError, first_line
from meshwright.train.resolve_model import extend_only_by

MOST_SAMPLES = 100_000
"""That are read of each run, which takes about 10 s."""


@dataclass(frozen=True)
class OtherDocument:
    """The first document of a source that isn't the same in both runs."""

    name: str
    """The source's, and the number of the document."""
    tokens: Sequence[int]
    """Of it in A and in B; 0: it isn't there."""
    places: Sequence[str]
    """File and row in A and in B."""
    step: int | None
    """The first of the steps asked about that reads other samples; None: too many were asked
    about, or the runs have other batches."""

    def __str__(self) -> str:
        (a, b), (place_a, place_b) = self.tokens, self.places
        return f"{self.name}: {place_a} with {a:,} tokens in A, {place_b} with {b:,} in B"


def other_document(
    a: RecordedRun, b: RecordedRun, starts: Sequence[Row], steps: range
) -> OtherDocument | str | None:
    """Return the document; None if `steps` read the same samples in both runs; or why there is no
    document to name, as a clause."""
    contents = [start["data_content"] for start in starts]
    name = next(n for n, content in contents[0].items() if contents[1].get(n) != content)
    opened = list[tuple[JobConfig, CachedSource]]()
    for run, content in zip((a, b), contents, strict=True):
        try:
            config = load_config([str(run.folder / "config.toml")])
            extend_only_by(config.experimental.custom_import)
            sources = {one.entry.name: one for one in open_data("training", config)}
        except ConfigError as error:
            return f"the data of {run.folder} can't be opened: {first_line(error)}"
        source = sources.get(name)
        if source is None or source.content != content.get(name):
            return f"{name} isn't any more what {run.folder} has read"
        if not isinstance(source, CachedSource):
            return f"{name} is streamed, so its documents have no numbers"
        opened.append((config, source))
    step = None
    if _is_comparable(opened[0][0], opened[1][0], steps):
        step = _first_step(opened, steps)
        if step is None:
            return None
    number = opened[0][1].cache.first_other_document(opened[1][1].cache)
    tokens, places = zip(*(_look(*one, number) for one in opened), strict=True)
    return OtherDocument(f"{name} {number}", tokens, places, step)


def _look(config: JobConfig, source: CachedSource, number: int) -> tuple[int, str]:
    """Return how many tokens a document has, and where it comes from."""
    if number >= source.cache.num_documents:
        return 0, "absent"
    document = source.cache.document(number)
    return document.end - document.begin, place_of(source, document, config)


def _is_comparable(a: JobConfig, b: JobConfig, steps: range) -> bool:
    """Return whether sample n of one run stands for sample n of the other, and n stays small."""
    size = a.training.global_batch_size
    has_mixture = bool(a.training.datasets or b.training.datasets)
    is_equal = size == b.training.global_batch_size and a.training.seed == b.training.seed
    return is_equal and not has_mixture and 0 < size * len(steps) <= MOST_SAMPLES


def _first_step(opened: Sequence[tuple[JobConfig, CachedSource]], steps: range) -> int | None:
    """Return the first of `steps` that doesn't read the same tokens in both."""
    left, right = (
        source.samples(SampleRules(config.training.seq_len + 1, config.training.seed))
        for config, source in opened
    )
    size = opened[0][0].training.global_batch_size
    for step in steps:
        for number in range(size * (step - 1), size * step):
            if not np.array_equal(left.read(number).raw, right.read(number).raw):
                return step
    return None
