"""The next-token loss, normalised once over the global batch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORE = -100
"""Label of a position without loss."""


def token_loss(logits: Tensor, labels: Tensor, num_labels: Tensor) -> Tensor:
    """This rank's part of the mean next-token loss over the global batch, in nats per label.

    Adding the result over data-parallel ranks and microbatches gives the mean over every label
    that counts, however unevenly the ignored ones fall. Averaging per-rank means would not: a rank
    with few labels would weigh as much as a full one. See docs/decisions/0002-loss-scaling.md.

    Args:
        logits: (B, S, V), any float dtype; the upcast to fp32 happens here and nowhere else. As a
            DTensor they may be cut along V: within torch's `loss_parallel`, backward included.
        labels: (B, S) int64; `IGNORE` marks positions without loss.
        num_labels: () labels that count, over all data-parallel ranks and microbatches.

    Returns:
        () fp32, differentiable with respect to `logits`.

    Raises:
        ValueError: if `labels` is not `logits` without its last dimension.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} disagree")
    flat = logits.flatten(0, 1).float()  # (B*S, V)
    total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    if isinstance(total, DTensor):  # of logits that are cut along the vocabulary
        total = total.to_local()
    return total / num_labels


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of `logits`, added up over this rank's counted labels, in nats.

    Args:
        logits, labels: as `token_loss` takes them.

    Returns:
        () fp64: of many labels, or of none.
    """
    flat = logits.flatten(0, 1).float()  # (B*S, V)
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="none")
    if isinstance(losses, DTensor):  # of logits that are cut along the vocabulary
        losses = losses.to_local()
    return losses.sum(dtype=torch.float64)
