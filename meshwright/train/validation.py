"""Validation: the loss on held-out data, and texts that the model writes, on any mesh."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.datasets.loader import padded_samples, to_batches
from meshwright.datasets.samples import CachedSource, Sample, SampleRules
from meshwright.datasets.stream import Cursor, OpenSource
from meshwright.datasets.tokenizers.kinds import prompt_tokens, text_ends
from meshwright.models.loss import IGNORE, Batch, SummedLoss, has_loss
from meshwright.parallelisms.context_parallel import local_part, local_positions
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.system.errors import ConfigError
from meshwright.train.build import build_stream
from meshwright.train.optim.average import Average
from meshwright.train.resolve import ResolvedJob


def figures_of(loss: float, num_labels: int, num_bytes: int) -> dict[str, float]:
    """Return the figures of what `evaluate` gives: nats per counted label, every label weighing the
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
        model: as the trainer has it, between two steps. It is not switched to `eval()`, since
            nothing in it would differ.
        steps: each with the microbatches of a training step, as many and of the same shapes, on
            the device; ranks that differ along pp, cp or tp alone have the same. Missing sequences
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


NONE = -1
"""In the place of a token that this rank does not know."""


class NextToken(SummedLoss):
    """Replaces a model's loss, whose logits choose a token for each sequence."""

    def __init__(self, loss: SummedLoss) -> None:
        super().__init__()
        self._loss = loss

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """(B, S, D), (V, D), (B, S) -> (B,) int64: the likeliest token after the position whose
        label counts; `NONE` in a sequence without such a label."""
        is_wanted = has_loss(labels)
        logits = self._loss.logits(x, weight, is_wanted.int().argmax(1))  # (B, 1, V)
        return logits[:, 0].argmax(-1).where(is_wanted.any(1), NONE)


@torch.no_grad()
def continue_prompts(
    model: LocalModel,
    prompts: Sequence[Sequence[int]],
    meshes: Meshes,
    *,
    shape: tuple[int, int],
    num_tokens: int,
    stop: Collection[int],
    mask_documents: bool,
    is_stopped: Callable[[], bool],
) -> list[list[int]] | None:
    """Return the likeliest tokens after each prompt; None if the job was asked to stop meanwhile.

    The state of training is unchanged. Collective.

    Args:
        model: as `evaluate` takes it.
        prompts: at least one token each; with `num_tokens` more, at most as long as a sequence.
        shape: B and S of a microbatch of training. B prompts are continued at a time.
        stop: tokens that end a text; they are not part of it.
        mask_documents: give attention the mask that it has in training.
        is_stopped: a collective, asked before each token.
    """
    rows = [list(prompt) for prompt in prompts]
    positions = local_positions(shape[1], meshes.cp, torch.device(meshes.world.device_type))

    def choose(some: Sequence[Sequence[int]]) -> list[int] | None:
        if is_stopped():
            return None
        return _next_tokens(model, _batch(some, shape, mask_documents), positions, meshes)

    with _chooses_tokens(model):
        is_whole = all(
            _continue(rows[first : first + shape[0]], choose, num_tokens, stop)
            for first in range(0, len(rows), shape[0])
        )
    reset_after_no_grad(model.stages)
    if not is_whole:
        return None
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _continue(
    rows: Sequence[list[int]],
    choose: Callable[[Sequence[Sequence[int]]], list[int] | None],
    num_tokens: int,
    stop: Collection[int],
) -> bool:
    """Put the tokens that `choose` gives behind each of `rows`; return False once it gives none."""
    ended = [False] * len(rows)
    for _ in range(num_tokens):
        chosen = choose(rows)
        if chosen is None:
            return False
        for number, (row, token) in enumerate(zip(rows, chosen, strict=False)):
            ended[number] |= token in stop
            if not ended[number]:
                row.append(token)
        if all(ended):
            break
    return True


def _batch(rows: Sequence[Sequence[int]], shape: tuple[int, int], mask_documents: bool) -> Batch:
    """Return a microbatch whose only labels that count are at the ends of `rows`; causal attention
    does not see the padding after them."""
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        labels[number, len(row) - 1] = 0
    documents = torch.zeros(shape, dtype=torch.int32) if mask_documents else None
    return Batch(tokens, labels, documents)


def _next_tokens(model: LocalModel, batch: Batch, positions: Tensor, meshes: Meshes) -> list[int]:
    """Return the next token of each sequence, the same on every rank."""
    chosen = torch.full((len(batch.tokens),), NONE, device=positions.device)

    def take(tokens: Tensor, _: Batch) -> None:
        chosen.copy_(tokens)

    batch = local_part(batch.to(positions.device), positions)
    model.forward_all([batch], positions, take)
    # over the whole job: ranks without the last stage, or without the position, have NONE
    dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
    return [int(token) for token in chosen.tolist()]


@contextmanager
def _chooses_tokens(model: LocalModel) -> Iterator[None]:
    """Within, the last stage gives tokens instead of a loss."""
    outputs = [stage.output for stage in model.stages if stage.output is not None]
    before = [output.loss for output in outputs]
    for output in outputs:
        output.loss = NextToken(output.loss)
    try:
        yield
    finally:
        for output, loss in zip(outputs, before, strict=True):
            output.loss = loss


Fail = Callable[[Exception], None]
"""Notes that this rank cannot continue, so that all ranks stop."""


class Validation:
    """The evaluation of a model on held-out sources. Every call is a collective.

    Streamed sources are read here, once, and kept: whether they hold enough shows before the first
    step, and no later validation waits for a network.

    Raises:
        ConfigError: if a source holds fewer samples than it is to give.
    """

    def __init__(
        self, plan: ResolvedJob, sources: Sequence[OpenSource], meshes: Meshes, device: torch.device
    ) -> None:
        self._plan, self._training = plan, plan.config.training
        self._sources, self._meshes, self._device = sources, meshes, device
        known = plan.tokenizer.token_bytes
        self._tells_bytes = known is not None
        sizes = known if known is not None else [0] * plan.tokenizer.vocab_size
        self._token_bytes = torch.tensor(sizes, device=device)
        self._kept = {
            source.entry.key: list(self._read(source))
            for source in sources
            if not isinstance(source, CachedSource)
        }

    def __call__(
        self,
        model: LocalModel,
        is_stopped: Callable[[], bool],
        fail: Fail,
        average: Average | None = None,
    ) -> dict[str, float]:
        """Return the figures by name, without a source that it was stopped in: that is asked
        before each step, a collective.

        Args:
            average: of the weights, which is evaluated as well.
        """
        figures = self._figures(model, is_stopped, fail)
        if average is not None:
            with average.in_place():
                of_mean = self._figures(model, is_stopped, fail)
            figures |= {f"average/{name}": figure for name, figure in of_mean.items()}
        return figures

    def _figures(
        self, model: LocalModel, is_stopped: Callable[[], bool], fail: Fail
    ) -> dict[str, float]:
        figures: dict[str, float] = {}
        for source in self._sources:
            steps = _until_stopped(self._steps(source), is_stopped, fail)
            sums = evaluate(model, steps, self._meshes, self._token_bytes)
            if is_stopped():
                break
            prefix = "validation/" + f"{source.entry.name}/" * (len(self._sources) > 1)
            found = figures_of(*sums)
            if not self._tells_bytes:
                del found["bits_per_byte"]
            figures |= {f"{prefix}{name}": figure for name, figure in found.items()}
        return figures

    def _steps(self, source: OpenSource) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches of each step, on the device."""
        size, mask_documents = self._training.local_batch_size, self._training.mask_documents
        for samples in self._kept.get(source.entry.key) or self._read(source):
            batches = to_batches(samples, size, mask_documents)
            yield [batch.send(self._device) for batch in batches]

    def _read(self, source: OpenSource) -> Iterator[list[Sample]]:
        """Yield this rank's samples of each step."""
        training, num_samples = self._training, self._plan.config.validation.num_samples
        rules = SampleRules(
            training.seq_len + 1,
            # the first samples of a set would be those of its first file; all come as they lie
            seed=None if num_samples == -1 else 0,
            max_epochs=1,
            max_bad_records=training.max_bad_records,
        )
        stream = build_stream(self._plan, [source], self._meshes, Cursor(), rules)
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


def write_texts(
    plan: ResolvedJob, meshes: Meshes, model: LocalModel, is_stopped: Callable[[], bool]
) -> dict[str, str]:
    """Continue `validation.sample_prompts`; return texts by prompt, none if it was stopped."""
    validation, training, tokenizer = plan.config.validation, plan.config.training, plan.tokenizer
    continued = continue_prompts(
        model,
        [prompt_tokens(tokenizer, text) for text in validation.sample_prompts],
        meshes,
        shape=(training.local_batch_size, training.seq_len),
        num_tokens=validation.sample_tokens,
        stop=text_ends(tokenizer),
        mask_documents=training.mask_documents,
        is_stopped=is_stopped,
    )
    return {
        text: tokenizer.decode([*tokenizer.encode(text), *tokens])
        for text, tokens in zip(validation.sample_prompts, continued or [], strict=False)
    }
