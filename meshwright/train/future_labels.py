"""The losses of multi-token prediction in a step: labels of further tokens, and their weight."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.loss import Batch, has_loss
from meshwright.parallelisms.meshes import Meshes


def count_future_labels(batches: Sequence[Batch], meshes: Meshes) -> Tensor:
    """Return how many labels of each depth count in the global batch: (k,) int64, which is empty if
    the model predicts the next token only. Collective."""
    labels = [batch.future_labels for batch in batches if batch.future_labels is not None]
    if not labels:
        return torch.empty(0, device=batches[0].tokens.device)
    counts = torch.stack([has_loss(one).sum((0, 2)) for one in labels]).sum(0)
    dist.all_reduce(counts, group=meshes.loss.get_group())
    return counts


def weigh_future(
    batches: Sequence[Batch], num_labels: Tensor, num_future: Tensor, weight: float
) -> list[Batch]:
    """Return the microbatches with the factors that give the loss of each depth its weight in
    the mean loss. DeepSeek-AI 2024, arXiv:2412.19437, equations 24 and 25, but with a mean over
    the labels that count.

    Args:
        num_labels, num_future: as `count_labels` and `count_future_labels` return them.
        weight: of the mean over depths.
    """
    if not len(num_future):
        return [*batches]
    # the sum of all losses is divided by `num_labels`
    scales = weight / len(num_future) * num_labels / num_future.clamp(min=1)
    return [replace(batch, future_scales=scales.expand(len(batch.tokens), -1)) for batch in batches]
