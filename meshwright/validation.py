"""How well a model does on data that it does not learn from, on any mesh."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.batch import Batch
from meshwright.models.layers.loss import IGNORE
from meshwright.parallelisms.context_parallel import local_part, local_positions
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks, the same on each."""

    loss: float
    """Nats per counted label, every label weighing the same; nan if none counts."""
    num_labels: int
    """Number of labels that are not `IGNORE`."""
    num_bytes: int
    """Of text that they stand for."""

    @property
    def perplexity(self) -> float:
        """e to the loss; inf where that is beyond a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Size of the text compressed by the model: unlike the loss, it can be compared
        between tokenizers. nan if there are no bytes."""
        if self.num_bytes == 0:
            return math.nan
        return self.loss * self.num_labels / math.log(2) / self.num_bytes


@torch.no_grad()
def evaluate(
    model: LocalModel,
    steps: Iterable[Sequence[Batch]],
    meshes: Meshes,
    token_bytes: Tensor,
) -> Evaluation:
    """Return the loss of `model` on `steps`; nothing that training will find is changed.

    Waits for the device once, at the end. Collective: every rank of the job must call it, with as
    many steps.

    Args:
        model: as `train_step` takes it, between two steps. It is not switched to `eval()`, since
            nothing in it would differ.
        steps: each with the microbatches of a training step, as many and of the same shapes, on
            the device; ranks that differ along pp, cp or tp alone have the same. What is missing
            is filled up with sequences whose labels are all `IGNORE`.
        token_bytes: (V,) int on the device: bytes of text that each token stands for.
    """
    device = torch.device(meshes.world.device_type)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, labels, bytes
    positions: Tensor | None = None

    def add(loss: Tensor, batch: Batch) -> None:
        figures = _figures(loss, batch.labels, token_bytes)
        if meshes.tp.get_local_rank() == 0:  # the others of a tp group have the same
            sums.add_(figures)

    for batches in steps:
        if positions is None:
            positions = local_positions(batches[0].tokens.shape[1], meshes.cp, device)
        if meshes.cp.size() > 1:
            batches = [local_part(batch, positions) for batch in batches]
        model.forward_all(batches, positions, add)
    for stage in model.stages:
        reset_after_no_grad(stage)
    dist.all_reduce(sums)  # over the whole job: where nothing was counted there are zeros
    loss, num_labels, num_bytes = sums.tolist()
    return Evaluation(
        loss=loss / num_labels if num_labels else math.nan,
        num_labels=int(num_labels),
        num_bytes=int(num_bytes),
    )


def _figures(loss: Tensor, labels: Tensor, token_bytes: Tensor) -> Tensor:
    """Loss, labels and bytes of a microbatch: (3,) fp64, which counts exactly up to 2^53."""
    is_counted = labels != IGNORE
    num_labels = is_counted.sum()
    num_bytes = (token_bytes[labels.where(is_counted, 0)] * is_counted).sum()
    return torch.stack([loss.double(), num_labels.double(), num_bytes.double()])
