"""The first document in which the data of two runs differ, and the first step that reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.commands.replay.recorded import RecordedRun
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.datasets.opening import open_data, recipe_of
from meshwright.datasets.samples import CachedSource, SampleRules
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.locate import locate
from meshwright.metrics.report.run import Row
from meshwright.system.errors import ConfigError, first_line


@dataclass(frozen=True)
class OtherDocument:
    """The first document of a source that isn't the same in both runs."""

    name: str
    """The source's, and the number of the document."""
    tokens: tuple[int, int]
    """Of it in A and in B; 0: it isn't there."""
    places: tuple[str, str]
    """File and row in A and in B."""
    first_step: int | None
    """That reads a different sample; None: none so far, or the runs have other batches."""

    @property
    def words(self) -> str:
        """The document in both runs."""
        (a, b), (place_a, place_b) = self.tokens, self.places
        return f"{self.name}: {place_a} with {a:,} tokens in A, {place_b} with {b:,} in B"


def other_document(a: RecordedRun, b: RecordedRun, starts: tuple[Row, Row]) -> OtherDocument | str:
    """Return the document; or why there is none to name, as a clause."""
    contents: list[Mapping[str, str]] = [start["data_content"] for start in starts]
    opened = list[tuple[JobConfig, CachedSource]]()
    name = next(n for n, content in contents[0].items() if contents[1].get(n) != content)
    for run, content in zip((a, b), contents, strict=True):
        try:
            config = load_config([str(run.folder / "config.toml")])
            sources = {one.entry.name: one for one in open_data("training", config)}
        except ConfigError as error:
            return f"the data of {run.folder} can't be opened: {first_line(error)}"
        source = sources.get(name)
        if source is None or source.content != content.get(name):
            return f"{name} isn't any more what {run.folder} has read"
        if not isinstance(source, CachedSource):
            return f"{name} is streamed, so its documents have no numbers"
        opened.append((config, source))
    (config, ours), (other_config, theirs) = opened
    number = _first_other(ours.cache, theirs.cache)
    lengths, places = list[int](), list[str]()
    for of_run, source in opened:
        is_there = number < source.cache.num_documents
        document = source.cache.document(number) if is_there else None
        lengths.append(document.end - document.begin if document else 0)
        try:
            recipe = recipe_of(source.entry, of_run)
            places.append(locate(recipe, source.cache, document) if document else "absent")
        except ConfigError as error:  # the file has been edited since
            places.append(first_line(error))
    last = min(max(run.steps) for run in (a, b))
    step = _first_step(config, other_config, ours, theirs, last)
    pairs = (lengths[0], lengths[1]), (places[0], places[1])
    return OtherDocument(f"{name} {number}", *pairs, step)


def _first_other(a: TokenCache, b: TokenCache) -> int:
    """Return the number of the first document that isn't the same in both caches."""
    count = min(a.num_documents, b.num_documents)
    for number in range(count):
        ours, theirs = a.document(number), b.document(number)
        if ours != theirs or not np.array_equal(a.tokens(*ours[1:]), b.tokens(*theirs[1:])):
            return number
    return count


def _first_step(
    a: JobConfig, b: JobConfig, ours: CachedSource, theirs: CachedSource, last: int
) -> int | None:
    """Return the first step with a different sample, of jobs with one source and equal batches."""
    size = a.training.global_batch_size
    if size != b.training.global_batch_size or a.training.datasets or size < 1:
        return None
    rules = (SampleRules(c.training.seq_len + 1, c.training.seed) for c in (a, b))
    left, right = (s.samples(r) for s, r in zip((ours, theirs), rules, strict=True))
    for number in range(size * last):
        if not np.array_equal(left.read(number).raw, right.read(number).raw):
            return number // size + 1
    return None
