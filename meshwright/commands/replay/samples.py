"""Which samples of a step stand out: by loss, by gradient, and the documents in them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.job_config import JobConfig
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import recipe_of
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.stream import DrawnSample, OpenSource, draw_samples
from meshwright.datasets.token_cache.cache import CachedDocument
from meshwright.datasets.token_cache.locate import locate
from meshwright.models.loss import Batch, has_loss
from meshwright.system.errors import ConfigError, first_line
from meshwright.train.running_job import RunningJob
from meshwright.train.token_losses import norm_of_part, token_losses
from meshwright.train.trainer import count_labels

STANDS_OUT = 3.5
"""Robust deviations from which a sample is taken for an outlier (Iglewicz and Hoaglin 1993, "How to
detect and handle outliers")."""

MOST_MEASURED = 64
"""Samples whose gradient is computed: those first whose loss deviates most."""

NUM_TOKENS = 3
"""Costliest tokens that are shown of a sample."""


@dataclass(frozen=True)
class DocumentPart:
    """A part of a document in a sample."""

    name: str
    """The source's, and the number of the document; or its place in a stream."""
    tokens: int
    loss: float
    """Mean over its labels that count; 0: none does."""
    place: str = ""
    """File and row, of the costliest document of a sample."""


@dataclass(frozen=True)
class StepSample:
    """A sample of a step."""

    index: int
    """In the global batch."""
    loss: float
    deviations: float
    """Of the loss from the median of the step's samples, in robust standard deviations."""
    grad_norm: float | None
    """Of its share of the step's gradient; None: not measured."""
    grad_deviations: float
    """The same of the logarithm of that; 0: not measured."""
    documents: Sequence[DocumentPart]
    """The costliest first."""
    costliest: Sequence[tuple[str, float]]
    """Tokens that the model expected least, and their losses."""


@dataclass(frozen=True)
class SampleTable:
    """The samples of a step that deviate most."""

    samples: Sequence[StepSample]
    without: Sequence[int]
    """Those that stand out."""
    norm_without: float | None
    """The gradient norm of the step without those."""


def robust_deviations(values: Tensor) -> Tensor:
    """Return how many standard deviations each value is from the median: infinitely many, if it
    isn't finite and others are.

    The deviation is 1.4826 times the median of distances, which a few outliers don't move
    (Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation").
    """
    is_finite = values.isfinite()
    if not is_finite.any():
        return torch.zeros_like(values)
    distances = values - values[is_finite].median()
    deviation = 1.4826 * distances[is_finite].abs().median()
    return (distances / deviation.clamp(min=1e-9)).where(is_finite, torch.inf)


def deviations_of(means: Tensor, counted: Tensor) -> Tensor:
    """Return the deviations of samples by their mean losses: 0 of one that has no targets.

    Args:
        counted: (samples, S) bool, the targets that count.
    """
    has_targets, deviations = counted.any(1), torch.zeros_like(means)
    deviations[has_targets] = robust_deviations(means[has_targets])
    return deviations


def measure_samples(
    job: RunningJob, step: int, batches: Sequence[Batch], count: int
) -> SampleTable:
    """Return the `count` samples of a step that deviate most, the furthest first. Collective.

    A loss may deviate to both sides. A gradient counts if it is large: text that repeats has one
    whose parts add up, though a model that can't copy yet finds no more in it than in other text.

    Args:
        step: the next one.
        batches: this rank's microbatches of the step, on the device.
    """
    losses = token_losses(job.trainer.model, batches, job.meshes).cpu()
    counted = has_loss(_all_labels(job, batches)).cpu()
    means = losses.sum(1) / counted.sum(1).clamp(min=1)
    deviations = deviations_of(means, counted)
    order = deviations.abs().argsort(descending=True)
    measured = order[: max(count, MOST_MEASURED)]
    norms, of_norms = torch.zeros_like(means), torch.zeros_like(means)
    has_norms = job.trainer.early is None  # which updates parameters within backward
    if has_norms:
        weighted = [job.trainer.with_loss_weights(batch) for batch in batches]
        labels = count_labels(weighted, job.meshes)
        labels = labels / job.meshes.cp.size()  # each rank of a cp group has all of them here
        for index in measured.tolist():
            norms[index] = norm_of_part(job.trainer, batches, [index], labels)
        logs = norms[measured].clamp(min=torch.finfo(norms.dtype).tiny).log()
        of_norms[measured] = deviations_of(logs, counted[measured])
    distances = deviations.hypot(of_norms.clamp(min=0))[measured]
    shown = measured[distances.argsort(descending=True)][:count].tolist()
    # not by gradients: one in a few clean steps has one so large
    out, norm_without = [index for index in shown if abs(deviations[index]) > STANDS_OUT], None
    rest = [index for index in order.tolist() if index not in out]
    if has_norms and out and rest:
        norm_without = norm_of_part(job.trainer, batches, rest)
    samples = list[StepSample]()
    if dist.get_rank() == 0:
        first = job.begin.sample + (step - job.resolved.resume_step - 1) * len(means)
        rules = rules_of(job)
        drawn = list(draw_samples(job.sources, job.begin, first, len(means), rules))
        places = dict[str, str]()
        for index in shown:
            of_labels = losses[index], counted[index]
            documents, costliest = _contents(job, drawn[index], *of_labels, places)
            of_sample = (values[index].item() for values in (means, deviations, norms, of_norms))
            loss, deviation, norm, of_norm = of_sample
            grad_norm = norm if has_norms else None
            samples.append(
                StepSample(index, loss, deviation, grad_norm, of_norm, documents, costliest)
            )
    return SampleTable(samples, out, norm_without)


def _all_labels(job: RunningJob, batches: Sequence[Batch]) -> Tensor:
    """Return the labels of the global batch, (sequences, S). Collective."""
    own = torch.stack([batch.labels for batch in batches])
    parts = [torch.empty_like(own) for _ in range(job.meshes.dp.size())]
    dist.all_gather(parts, own, group=job.meshes.dp.get_group())
    return torch.stack(parts, dim=1).flatten(0, 2)


def _contents(
    job: RunningJob, drawn: DrawnSample, losses: Tensor, counted: Tensor, places: dict[str, str]
) -> tuple[list[DocumentPart], list[tuple[str, float]]]:
    """Return the documents of a sample, the costliest first, and its costliest tokens.

    Args:
        losses, counted: (S,) of the sample's labels.
        places: of documents, which is kept up.
    """
    source, tokens = job.sources[drawn.source], drawn.sample.tokens[1:].tolist()
    piece = torch.from_numpy(drawn.sample.documents[1:])  # of each label
    documents = _documents(job, source, drawn)
    parts = list[DocumentPart]()
    for index, name in enumerate(documents):
        own = (piece == index) & counted
        loss = losses[own].mean().item() if own.any() else 0.0
        parts.append(DocumentPart(name, drawn.sample.lengths[index], loss))
    parts.sort(key=lambda part: -part.loss)
    name = parts[0].name
    if document := documents[name]:
        assert isinstance(source, CachedSource)
        if name not in places:
            places[name] = place_of(source, document, job.resolved.config)
        parts[0] = replace(parts[0], place=places[name])
    top = losses.topk(min(NUM_TOKENS, len(tokens)))
    costliest = [
        (job.resolved.tokenizer.decode([tokens[at]]), loss)
        for loss, at in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    return parts, costliest


def _documents(
    job: RunningJob, source: OpenSource, drawn: DrawnSample
) -> dict[str, CachedDocument | None]:
    """Return the documents of a sample by their names, in their order; None: it is streamed."""
    if not isinstance(source, CachedSource):
        return {f"{source.entry.name} {place}": None for place in drawn.sample.streamed_from}
    ranges = source.samples(rules_of(job)).ranges(drawn.number)
    found = [source.cache.document_at(begin) for begin, _ in ranges]
    return {f"{source.entry.name} {document.number}": document for document in found}


def place_of(source: CachedSource, document: CachedDocument, config: JobConfig) -> str:
    """Return the file and row of a document, or why they aren't known. Reads a part of the data."""
    try:
        return locate(recipe_of(source.entry, config), source.cache, document)
    except ConfigError as error:
        return first_line(error)


def rules_of(job: RunningJob) -> SampleRules:
    """Return how samples of the job are made."""
    training = job.resolved.config.training
    # of bad records, the run has decided
    return SampleRules(training.seq_len + 1, training.seed, max_bad_records=1 << 62)
