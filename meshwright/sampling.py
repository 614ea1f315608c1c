"""Texts of a model in training, on any mesh: the likeliest tokens after prompts.

Without kept keys and values. Each token takes a forward of whole sequences, as a validation does,
in the shapes of training. So it works on every mesh without another compilation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.batch import Batch
from meshwright.models.layers.loss import IGNORE, SummedLoss
from meshwright.parallelisms.context_parallel import local_part, local_positions
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes

NONE = -1
"""In the place of a token that this rank does not know."""


class NextToken(SummedLoss):
    """Replaces a model's loss, and chooses a token for each sequence.

    Args:
        loss: computes the logits, of all of the vocabulary.
    """

    def __init__(self, loss: SummedLoss) -> None:
        super().__init__()
        self._loss = loss

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """(B, S, D), (V, D), (B, S) -> (B,) int64: the likeliest token after the position whose
        label counts; `NONE` in a sequence without such a label."""
        is_wanted = labels != IGNORE
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
    eos_id: int | None,
    mask_documents: bool,
    is_stopped: Callable[[], bool],
) -> list[list[int]] | None:
    """Return the likeliest tokens after each prompt; None if the job was asked to stop meanwhile.

    The state of training is unchanged. Collective: every rank of the job must call it.

    Args:
        model: as `evaluate` takes it.
        prompts: at least one token each; with `num_tokens` more, at most as long as a sequence.
        shape: B and S of a microbatch of training. B prompts are continued at a time.
        eos_id: token that ends a text; it is not part of it.
        mask_documents: give attention the mask that it has in training.
        is_stopped: the same on every rank; asked before each token.
    """
    positions = local_positions(shape[1], meshes.cp, torch.device(meshes.world.device_type))

    def choose(rows: Sequence[Sequence[int]]) -> list[int] | None:
        if is_stopped():
            return None
        batch = _batch(rows, shape, positions.device, mask_documents)
        return _choose(model, batch, positions, meshes)

    texts: list[list[int]] = []
    with _chooses_tokens(model):
        for first in range(0, len(prompts), shape[0]):
            found = _continue(prompts[first : first + shape[0]], choose, num_tokens, eos_id)
            if found is None:
                break
            texts += found
    for stage in model.stages:
        reset_after_no_grad(stage)
    return texts if len(texts) == len(prompts) else None


def _continue(
    prompts: Sequence[Sequence[int]],
    choose: Callable[[Sequence[Sequence[int]]], list[int] | None],
    num_tokens: int,
    eos_id: int | None,
) -> list[list[int]] | None:
    """Return the tokens that `choose` puts after each prompt; None once it gives none."""
    rows, ended = [list(prompt) for prompt in prompts], [False] * len(prompts)
    for _ in range(num_tokens):
        chosen = choose(rows)
        if chosen is None:
            return None
        for number, row in enumerate(rows):
            ended[number] |= chosen[number] == eos_id
            if not ended[number]:
                row.append(chosen[number])
        if all(ended):
            break
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _batch(
    rows: Sequence[Sequence[int]],
    shape: tuple[int, int],
    device: torch.device,
    mask_documents: bool,
) -> Batch:
    """Return a microbatch whose only labels that count are at the ends of `rows`; causal attention
    does not see the padding after them."""
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        labels[number, len(row) - 1] = 0
    documents = torch.zeros(shape, dtype=torch.int32) if mask_documents else None
    return Batch(tokens, labels, documents).to(device)


def _choose(model: LocalModel, batch: Batch, positions: Tensor, meshes: Meshes) -> list[int]:
    """Return the next token of each sequence, the same on every rank."""
    chosen = torch.full((len(batch.tokens),), NONE, device=positions.device)

    def take(tokens: Tensor, _: Batch) -> None:
        chosen.copy_(tokens)

    if meshes.cp.size() > 1:
        batch = local_part(batch, positions)
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
