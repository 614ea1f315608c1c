"""Validation: the loss on held-out data, on any mesh."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.loader import padded_samples, to_batches
from meshwright.datasets.samples import Sample, SampleRules, blank_sample, to_sample
from meshwright.datasets.stream import Cursor, OpenSource
from meshwright.models.loss import Batch, has_loss
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_part, local_positions
from meshwright.system.errors import ConfigError, check
from meshwright.system.files import warn_once
from meshwright.train.build import build_stream
from meshwright.train.resolve import ResolvedJob


def figures_of(loss: float, num_labels: int, num_bytes: int) -> dict[str, float]:
    """Return the metrics of `evaluate`: nats per counted label, every label weighing the
    same; e to that, inf beyond a float; and the size of the text compressed by the model, which,
    unlike the loss, can be compared between tokenizers. nan where nothing counts."""
    mean = torch.tensor(loss, dtype=torch.float64) / num_labels
    bits = loss / math.log(2) / num_bytes if num_bytes else math.nan
    return {"loss": mean.item(), "perplexity": mean.exp().item(), "bits_per_byte": bits}


@torch.no_grad()
def evaluate(
    model: LocalModel, steps: Iterable[Sequence[Batch]], meshes: Meshes, token_bytes: Tensor
) -> tuple[float, int, int]:
    """Return the sum of the losses of `model` on `steps`, how many labels count in it, and bytes
    of text that they stand for: over all ranks, the same on each. Nothing that training will find
    is changed.

    Waits for the device once, at the end. Collective, with as many steps on every rank.

    Args:
        model: as the trainer has it, between two steps. It isn't switched to `eval()`, since
            nothing in it would differ.
        steps: each with the microbatches of a training step, as many and of the same shapes, on
            the device; ranks that differ along pp, cp or tp only have the same. Missing sequences
            are filled up with some whose labels are all `IGNORE`.
        token_bytes: (V,) int on the device: bytes of text that each token stands for.
    """
    device = torch.device(meshes.world.device_type)
    # loss, labels and bytes: fp64 counts exactly up to 2^53
    sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(loss: Tensor, batch: Batch) -> None:
        if meshes.tp.get_local_rank() > 0:  # the first of a tp group has the same
            return
        is_counted = has_loss(batch.labels)
        num_bytes = (token_bytes[batch.labels.where(is_counted, 0)] * is_counted).sum()
        sums.add_(torch.stack([part.double() for part in (loss, is_counted.sum(), num_bytes)]))

    for batches in steps:
        positions = local_positions(batches[0].tokens.shape[1], meshes.cp, device)
        batches = [local_part(batch, positions) for batch in batches]
        model.forward_all(batches, positions, add)
    reset_after_no_grad(model.stages)
    dist.all_reduce(sums)  # over the whole job: where nothing was counted there are zeros
    loss, num_labels, num_bytes = sums.tolist()
    return loss, int(num_labels), int(num_bytes)


def _token_bytes(resolved: ResolvedJob, device: torch.device) -> Tensor:
    """Return the bytes of text that each token stands for, (V,) int; 0 if that isn't known."""
    known = resolved.tokenizer.token_bytes
    return torch.tensor(known or [0] * resolved.tokenizer.vocab_size, device=device)


def _known_figures(resolved: ResolvedJob, sums: tuple[float, int, int]) -> dict[str, float]:
    """Return `figures_of` the sums, without bits per byte if bytes aren't known."""
    figures = figures_of(*sums)
    if resolved.tokenizer.token_bytes is None:
        del figures["bits_per_byte"]
    return figures


def evaluate_texts(
    resolved: ResolvedJob,
    model: LocalModel,
    texts: Sequence[str],
    meshes: Meshes,
    device: torch.device,
) -> dict[str, float]:
    """Return the metrics of `model` on text, by name. Collective: every rank has all text.

    Each text is between BOS and EOS, and split into parts of S + 1 tokens that overlap by one, so
    that each token but the first is predicted once, from those before it in its part.

    Raises:
        ConfigError: if no token has one before it.
    """
    training, tokenizer = resolved.config.training, resolved.tokenizer
    length, samples = training.seq_len + 1, list[Sample]()
    for text in texts:
        ids = [*tokenizer.before, *tokenizer.encode(text), *tokenizer.after]
        for first in range(0, len(ids) - 1, training.seq_len):
            part = np.array(ids[first : first + length], np.uint32)
            samples.append(to_sample([part], padded_to=length))
    check(bool(samples), "texts", [*texts], "have no token to predict", "pass longer ones")
    size = training.local_batch_size
    samples += [blank_sample(length)] * (-len(samples) % size)  # shapes stay as compiled
    batches = to_batches(samples, size, training.mask_documents)
    steps = ([batch.send(device)] for batch in batches)
    return _known_figures(resolved, evaluate(model, steps, meshes, _token_bytes(resolved, device)))


Fail = Callable[[Exception], None]
"""Notes that this rank can't continue, so that all ranks stop."""


class Validation:
    """The evaluation of a model on held-out sources. Every call is a collective.

    Streamed sources are read here, once, and kept: whether they hold enough shows before the first
    step, and no later validation waits for a network.

    Raises:
        ConfigError: if a source holds fewer samples than it is to give.
    """

    def __init__(
        self,
        resolved: ResolvedJob,
        sources: Sequence[OpenSource],
        meshes: Meshes,
        device: torch.device,
    ) -> None:
        self._resolved, self._training = resolved, resolved.config.training
        self._sources, self._meshes, self._device = sources, meshes, device
        self._token_bytes = _token_bytes(resolved, device)
        self._kept = {
            source.entry.key: list(self._read(source))
            for source in sources
            if not isinstance(source, CachedSource)
        }

    def __call__(
        self, model: LocalModel, is_stopped: Callable[[], bool], fail: Fail
    ) -> dict[str, float]:
        """Return the metrics by name, without a source that it was stopped in: that is asked
        before each step, a collective."""
        figures: dict[str, float] = {}
        for source in self._sources:
            steps = _until_stopped(self._steps(source), is_stopped, fail)
            sums = evaluate(model, steps, self._meshes, self._token_bytes)
            if is_stopped():
                break
            if not sums[1]:
                rule = "none of its labels counts, as of chats that end before an answer"
                fix = "raise validation.num_samples or training.seq_len"
                warn_once(f"validation on {source.entry.name} has no loss: {rule}; {fix}")
            of_source = _known_figures(self._resolved, sums)
            many = len(self._sources) > 1
            prefix = f"validation/{source.entry.name}" if many else "validation"
            figures |= {f"{prefix}/{name}": figure for name, figure in of_source.items()}
        else:
            if len(self._sources) > 1:
                losses = [figures[f"validation/{one.entry.name}/loss"] for one in self._sources]
                figures["validation/loss"] = sum(losses) / len(losses)
        return figures

    def _steps(self, source: OpenSource) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches of each step, on the device."""
        size, mask_documents = self._training.local_batch_size, self._training.mask_documents
        for samples in self._kept.get(source.entry.key) or self._read(source):
            batches = to_batches(samples, size, mask_documents)
            yield [batch.send(self._device) for batch in batches]

    def _read(self, source: OpenSource) -> Iterator[list[Sample]]:
        """Yield this rank's samples of each step."""
        training, num_samples = self._training, self._resolved.config.validation.num_samples
        rules = SampleRules(
            training.seq_len + 1,
            # the first samples of a set would be those of its first file; all come as they lie
            seed=None if num_samples == -1 else 0,
            max_epochs=1,
            max_bad_records=training.max_bad_records,
        )
        stream = build_stream(self._resolved, [source], self._meshes, Cursor(), rules)
        if isinstance(source, CachedSource) and num_samples == -1:
            num_samples = source.samples_per_epoch(rules.length)
        return padded_samples(stream, num_samples)


def _until_stopped(
    steps: Iterator[list[Batch]], is_stopped: Callable[[], bool], fail: Fail
) -> Iterator[list[Batch]]:
    """Yield the steps that all ranks have, until they are to stop. Collective."""
    while True:
        batches: list[Batch] | None = None
        try:
            batches = next(steps, None)
        except (ConfigError, OSError) as error:
            fail(error)
        if is_stopped() or batches is None:
            return
        yield batches
