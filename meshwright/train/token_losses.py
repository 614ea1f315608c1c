"""The loss of every token, on any mesh; and the gradient norm of a part of a step's labels."""

import dataclasses
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.loss import IGNORE, Batch, SummedLoss, has_loss
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_part, local_positions
from meshwright.train.future_labels import count_future_labels, weigh_future
from meshwright.train.optim.gradients import local_square_sums
from meshwright.train.trainer import Trainer, count_labels, summed


class LossPerToken(SummedLoss):
    """Replaces a model's loss, and doesn't add up."""

    def __init__(self, loss: SummedLoss) -> None:
        super().__init__()
        self._loss = loss

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        """(B, S, D), (V, D), (B, S) -> (B, S) fp32, 0 where a label doesn't count."""
        rows = [
            F.cross_entropy(
                self._loss.logits(one.unsqueeze(0), weight)[0].float(),
                of_one.where(has_loss(of_one), IGNORE),
                ignore_index=IGNORE,
                reduction="none",
            )
            for one, of_one in zip(x, labels, strict=True)  # one sequence's logits at a time
        ]
        return torch.stack(rows)


def places_of(meshes: Meshes, num_batches: int, size: int) -> Tensor:
    """Return which sequences of the global batch this rank has: (num_batches, size)."""
    every = torch.arange(num_batches * meshes.dp.size() * size)
    return every.view(num_batches, meshes.dp.size(), size)[:, meshes.dp.get_local_rank()]


@torch.no_grad()
def token_losses(model: LocalModel, batches: Sequence[Batch], meshes: Meshes) -> Tensor:
    """Return the loss of every token of the global batch: (sequences, S) fp32, the same on every
    rank. Nothing that training will find is changed. Collective.

    Args:
        model: as the trainer has it, between two steps.
        batches: this rank's microbatches, on the device; labels are whole.
    """
    size, length = batches[0].tokens.shape
    places = places_of(meshes, len(batches), size)
    device = batches[0].tokens.device
    found = torch.zeros(len(batches) * meshes.dp.size() * size, length, device=device)
    positions = local_positions(length, meshes.cp, device)
    rows = iter(places.to(device))

    def take(losses: Tensor, _: Batch) -> None:
        at = next(rows)
        if meshes.tp.get_local_rank() == 0:  # the others of a tp group have the same
            found[at.unsqueeze(1), positions] = losses

    with model.with_loss(LossPerToken):
        model.forward_all([local_part(batch, positions) for batch in batches], positions, take)
    reset_after_no_grad(model.stages)
    dist.all_reduce(found)
    return found


def norm_of_part(
    trainer: Trainer,
    batches: Sequence[Batch],
    kept: Collection[int],
    num_labels: Tensor | None = None,
) -> float:
    """Return the norm of the gradient that the sequences `kept` of a global batch have. Gradients
    are gone afterwards, and weights stay. Collective.

    Args:
        batches: this rank's microbatches of a step.
        num_labels: that the loss is divided by, as `count_labels` gives it; None: the kept ones'.
    """
    meshes, model = trainer.meshes, trainer.model
    places = places_of(meshes, len(batches), len(batches[0].tokens))
    is_kept = torch.zeros(places.numel() * meshes.dp.size(), dtype=torch.bool)
    is_kept[list(kept)] = True
    positions = local_positions(batches[0].tokens.shape[1], meshes.cp, batches[0].tokens.device)
    wanted = list[Batch]()
    for batch, rows in zip(batches, places, strict=True):
        own = is_kept[rows].to(batch.labels.device).unsqueeze(1)
        part = _with_labels_of(trainer.with_loss_weights(batch), own)
        wanted.append(local_part(part, positions))
    if num_labels is None:
        num_labels = count_labels(wanted, meshes)
        num_future = count_future_labels(wanted, meshes)
    else:
        whole = [local_part(batch, positions) for batch in batches]
        num_future = count_future_labels(whole, meshes)
    wanted = weigh_future(wanted, num_labels, num_future, trainer.mtp_loss_weight)
    if model.pipeline is None:  # others are left out by all ranks; a schedule has a fixed number
        is_needed = is_kept.view(len(batches), -1).any(1).tolist()
        wanted = [one for one, needed in zip(wanted, is_needed, strict=True) if needed]
    trainer.forward_backward(wanted, positions, num_labels)
    squares = local_square_sums(model.named_parameters_once(), (), positions.device)
    trainer.forget()
    return float(summed(squares)[0][0].sqrt().item())


def _with_labels_of(batch: Batch, own: Tensor) -> Batch:
    """Return a batch in which only the labels of the sequences `own`, (B, 1) bool, count."""

    def kept(labels: Tensor, own: Tensor) -> Tensor:
        return labels.where(own | ~has_loss(labels), IGNORE)

    future = batch.future_labels
    future = None if future is None else kept(future, own.unsqueeze(1))
    return dataclasses.replace(batch, labels=kept(batch.labels, own), future_labels=future)
