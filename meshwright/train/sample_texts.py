"""Sample generations: how the model continues `validation.sample_prompts`, on any mesh."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.datasets.tokenizers.kinds import prompt_tokens, text_ends
from meshwright.metrics.observers import Evaluate, Observer
from meshwright.metrics.sinks import Texts
from meshwright.models.loss import IGNORE, Batch, SummedLoss, has_loss
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_part, local_positions
from meshwright.train.resolve import ResolvedJob


class SampleTexts(Observer):
    """Has the model continue the prompts at each validation.

    Args:
        add_texts: gets the text by prompt, which the next report writes.
    """

    def __init__(
        self,
        resolved: ResolvedJob,
        meshes: Meshes,
        model: LocalModel,
        add_texts: Callable[[Texts], None],
    ) -> None:
        self._resolved, self._meshes, self._model = resolved, meshes, model
        self._add_texts = add_texts

    def on_validation(
        self, evaluate: Evaluate, is_stopped: Callable[[], bool]
    ) -> Mapping[str, float]:
        self._add_texts(write_texts(self._resolved, self._meshes, self._model, is_stopped))
        return {}


def write_texts(
    resolved: ResolvedJob, meshes: Meshes, model: LocalModel, is_stopped: Callable[[], bool]
) -> dict[str, str]:
    """Continue `validation.sample_prompts`; return text by prompt, none if it was stopped."""
    validation, training, tokenizer = (
        resolved.config.validation,
        resolved.config.training,
        resolved.tokenizer,
    )
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


NONE = -1
"""In the place of a token that this rank doesn't know."""


class NextToken(SummedLoss):
    """Replaces a model's loss, whose logits choose a token for each sequence."""

    def __init__(self, loss: SummedLoss) -> None:
        super().__init__()
        self._loss = loss

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        """(B, S, D), (V, D), (B, S) -> (B,) int64: the most likely token after the position whose
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
    """Return the most likely tokens after each prompt; None if the job was asked to stop meanwhile.

    The state of training is unchanged. Collective.

    Args:
        model: as `evaluate` takes it.
        prompts: at least one token each; with `num_tokens` more, at most as long as a sequence.
        shape: B and S of a microbatch of training. B prompts are continued at a time.
        stop: tokens that end a text; they aren't part of it.
        mask_documents: give attention the mask that it has in training.
        is_stopped: a collective, asked before each token.
    """
    rows = [list(prompt) for prompt in prompts]
    positions = local_positions(shape[1], meshes.cp, torch.device(meshes.world.device_type))

    def choose(some: Sequence[Sequence[int]]) -> list[int] | None:
        if is_stopped():
            return None
        return _next_tokens(model, _batch(some, shape, mask_documents), positions, meshes)

    with model.with_loss(NextToken):
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
    doesn't see the padding after them."""
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
