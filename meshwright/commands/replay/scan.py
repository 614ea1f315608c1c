"""The loss of every document under a checkpoint: the strangest, at both ends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.commands.replay.samples import place_of, robust_deviations
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.token_cache.cache import CachedDocument
from meshwright.datasets.token_cache.locate import document_tokens
from meshwright.models.loss import IGNORE, Batch, has_loss
from meshwright.system.errors import check
from meshwright.train.running_job import RunningJob
from meshwright.train.token_losses import places_of, token_losses

LEAST_TOKENS = 9
"""Of a piece of a document: the mean of fewer losses says nothing."""


@dataclass(frozen=True)
class ScannedDocument:
    """A document and its loss."""

    name: str
    """The source's, and the number of the document."""
    tokens: int
    loss: float
    deviations: float
    """From the median of its source's documents, in robust standard deviations."""
    place: str
    """File and row."""


@dataclass(frozen=True)
class Scan:
    """The documents at both ends."""

    num_documents: int
    highest: Sequence[ScannedDocument]
    lowest: Sequence[ScannedDocument]


@dataclass(frozen=True)
class _Piece:
    """A part of a document that fits a sequence."""

    document: int
    tokens: np.ndarray


def scan_documents(job: RunningJob, count: int, note: Callable[[int], None]) -> Scan:
    """Return the `count` documents of cached sources with the highest deviations, and with the
    lowest. Collective.

    Args:
        note: gets the number of each document up to which all are done.

    Raises:
        ConfigError: if every source is streamed.
    """
    cached = [source for source in job.sources if isinstance(source, CachedSource)]
    names = ", ".join(source.entry.name for source in job.sources)
    fix = 'set dataset_mode = "cached", or replay a step: its samples are always read'
    check(bool(cached), "--scan", names, "is streamed: nobody knows where it ends", fix)
    config, found, total = job.resolved.config, list[ScannedDocument](), 0
    for source in cached:
        means, long_enough = _losses_of(job, source, total, note)
        total += len(means)
        deviations = robust_deviations(means[long_enough])
        order = deviations.argsort(descending=True).tolist()
        for index in dict.fromkeys([*order[:count], *order[-count:]]):
            number = int(long_enough[index])
            document = source.cache.document(number)
            values = means[number].item(), deviations[index].item()
            is_told = dist.get_rank() == 0  # it reads files
            place = place_of(source, document, config) if is_told else ""
            name, size = f"{source.entry.name} {number}", document.end - document.begin
            found.append(ScannedDocument(name, size, *values, place))
    found.sort(key=lambda one: -one.deviations)
    return Scan(total, found[:count], found[::-1][:count])


def _losses_of(
    job: RunningJob, source: CachedSource, done: int, note: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of each document, (documents,) fp64, and the numbers of those that
    aren't too short to have one."""
    training = job.resolved.config.training
    sums = torch.zeros(2, source.cache.num_documents, dtype=torch.float64)
    per_call = training.local_batch_size * job.meshes.dp.size()
    waiting = list[_Piece]()
    for piece in _pieces(source, training.seq_len):
        waiting.append(piece)
        if len(waiting) == per_call:
            _add_losses(job, waiting, sums)
            waiting.clear()
            note(done + piece.document)
    if waiting:
        _add_losses(job, waiting, sums)
    return sums[0] / sums[1], sums[1].nonzero().flatten()


def _pieces(source: CachedSource, length: int) -> Iterator[_Piece]:
    """Yield the documents, long ones in pieces of `length` + 1 tokens, of which one is shared."""
    number = 0
    for block in range(len(source.cache.block_starts) - 1):
        begin = int(source.cache.block_starts[block])
        for size in source.cache.lengths(block).tolist():
            end = begin + size
            tokens = document_tokens(source.cache, CachedDocument(number, begin, end))
            for start in range(0, max(size - 1, 1), length):
                piece = tokens[start : start + length + 1]
                if len(piece) >= LEAST_TOKENS:
                    yield _Piece(number, piece)
            number, begin = number + 1, end


def _add_losses(job: RunningJob, pieces: Sequence[_Piece], sums: Tensor) -> None:
    """Add the losses of pieces to the first row of `sums`, and their labels to the second."""
    training, dp = job.resolved.config.training, job.meshes.dp
    shape = training.local_batch_size * dp.size(), training.seq_len
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    for row, piece in enumerate(pieces):
        count = len(piece.tokens) - 1
        tokens[row, :count] = torch.from_numpy(piece.tokens[:-1])
        labels[row, :count] = torch.from_numpy(piece.tokens[1:])
    own = places_of(job.meshes, 1, training.local_batch_size)[0]
    documents = torch.zeros_like(tokens, dtype=torch.int32) if training.mask_documents else None
    batch = Batch(tokens[own], labels[own], None if documents is None else documents[own])
    losses = token_losses(job.trainer.model, [batch.to(job.device)], job.meshes).cpu()
    owners = torch.tensor([piece.document for piece in pieces])
    parts = torch.stack([losses.sum(1), has_loss(labels).sum(1)]).double()
    sums.index_add_(1, owners, parts[:, : len(pieces)])
