"""Which experts each token goes through, and how evenly that loads them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Router(nn.Linear):
    """Logits of the experts, in fp32 whatever the type of the activations."""

    bias: Tensor | None  # type: ignore[assignment]  # which torch's class has too

    def forward(self, x: Tensor) -> Tensor:  # (T, D) -> (T, E) fp32
        # rounded first: FSDP2 gives the rounded weight, a single process the fp32 one
        bias = None if self.bias is None else self.bias.to(x.dtype).float()
        return F.linear(x.float(), self.weight.to(x.dtype).float(), bias)


# an operator, so that activation checkpointing can keep its result: a choice that is made again
# may be a different one
@torch.library.custom_op("meshwright::choose_experts", mutates_args=())
def choose_experts(
    scores: Tensor, n_active: int, n_groups: int, n_active_groups: int, n_best: int = 2
) -> Tensor:
    """(T, E) fp32 -> (T, K) int64: the experts of highest score; between equal ones the first.

    With groups, only experts of a token's best groups count; a group's score is the sum of its
    `n_best` highest. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2, and its published
    code (2), and arXiv:2405.04434, section 2.2.2 (1).
    """
    if n_active_groups < n_groups:
        grouped = scores.unflatten(1, (n_groups, -1))
        best = grouped.topk(min(n_best, grouped.shape[2])).values.sum(-1)
        is_best = torch.zeros_like(best, dtype=torch.bool)
        is_best.scatter_(1, _highest(best, n_active_groups), True)
        scores = grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)
    return _highest(scores, n_active)


@choose_experts.register_fake
def _(
    scores: Tensor, n_active: int, n_groups: int, n_active_groups: int, n_best: int = 2
) -> Tensor:
    return scores.new_empty(scores.shape[0], n_active, dtype=torch.int64)


def _highest(scores: Tensor, count: int) -> Tensor:
    """(T, N) fp32 -> (T, count): as a stable descending sort has them.

    `torch.topk` breaks ties arbitrarily. Here none are left: the bits of a float, as an integer
    that is as large as the float is, and below them the column's number. A stable sort does the
    same in four times the time.
    """
    bits = (scores + 0.0).view(torch.int32)  # so that -0 is 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    number = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return ((ordered << 16) | number).topk(count).indices


def tally(chosen: Tensor, n_experts: int, counted: Tensor | None = None) -> Tensor:
    """(T, K) -> (E,) int64: how often each expert was chosen.

    Args:
        counted: (T,) bool, tokens that count; None: all.
    """
    ones = torch.ones_like(chosen)
    if counted is not None:
        ones = ones * counted.unsqueeze(1)
    return chosen.new_zeros(n_experts).scatter_add_(0, chosen.flatten(), ones.flatten())


@dataclass(frozen=True)
class BalanceLosses:
    """Weights of a router's own losses, each over the number of tokens of a step.

    None depends on how the step is split into ranks and microbatches.
    """

    batch: float = 0.0
    """Of the sum over experts of load x mean score. The load is that of the last step: the global
    batch's (Qiu et al. 2025, arXiv:2501.11873), not a microbatch's."""
    sequence: float = 0.0
    """The same, with the load of each sequence, as a mean over sequences. Source: DeepSeek-AI 2024,
    arXiv:2412.19437, equations 17 to 20."""
    z: float = 0.0
    """Of the mean squared logarithm of the sum of exponentials of logits. Source: Zoph et al. 2022,
    arXiv:2202.08906, equation 5."""


@torch.no_grad()
def load_of_sequences(
    chosen: Tensor,
    n_sequences: int,
    n_experts: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
    counted: Tensor | None,
) -> Tensor:
    """(B S, K) -> (B S, E) fp32: how many tokens of each token's whole sequence chose each expert,
    over the mean; `counted` as `tally` takes it."""
    row = torch.arange(n_sequences, device=chosen.device).view(-1, 1, 1) * n_experts
    numbered = (chosen.unflatten(0, (n_sequences, -1)) + row).flatten(0, 1)
    counts = tally(numbered, n_sequences * n_experts, counted).view(n_sequences, n_experts)
    return mean_one(sum_over_ranks(counts)).repeat_interleave(len(chosen) // n_sequences, 0)


def mean_one(counts: Tensor) -> Tensor:
    """(..., E) int64 -> the same over their mean, fp32."""
    total = counts.sum(-1, keepdim=True).clamp(min=1)
    return ((counts * counts.shape[-1]).double() / total).float()


@torch.no_grad()
def own_losses(
    logits: Tensor,
    scores: Tensor,
    losses: BalanceLosses,
    of_batch: Tensor,
    of_sequence: Tensor | None,
    counted: Tensor | None,
    *,
    is_softmax: bool,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of `losses` by `logits`, (T, E), None if all weights are 0; and metrics
    of the losses, (4,) fp32.

    The metrics are sums over tokens: of load x share of score by the batch's load and by the
    sequence's, of the squared logsumexp, and of the entropy of shares.

    Args:
        logits, scores: (T, E).
        of_batch: (E,) loads.
        of_sequence: (T, E), of each token's sequence; None: no loss needs it.
        counted: as `tally` takes it.
    """
    share, log_sum = scores / scores.sum(-1, keepdim=True), logits.logsumexp(-1, keepdim=True)
    ones, gradient = None if counted is None else counted.unsqueeze(1), None
    if losses.batch or losses.sequence or losses.z:
        load = losses.batch * of_batch
        if of_sequence is not None:
            load = load + losses.sequence * of_sequence
        gradient = share * (load - (share * load).sum(-1, keepdim=True))
        if not is_softmax:
            gradient = gradient * (1 - scores)
        if losses.z:
            gradient = gradient + 2 * losses.z * log_sum * logits.softmax(-1)
        gradient = gradient if ones is None else gradient * ones
    z = log_sum.square()
    if ones is not None:
        share, z = share * ones, z * ones
    batch, z = (share * of_batch).sum(), z.sum()
    sequence = torch.zeros_like(z) if of_sequence is None else (share * of_sequence).sum()
    entropy = -torch.special.xlogy(share, share).sum()
    return gradient, torch.stack([batch, sequence, z, entropy])


class _WithGradient(torch.autograd.Function):
    """`weights`, in whose backward `logits` get `gradient` too. So a layer's own loss needs no way
    to the model's: it works in any stage of a pipeline, and counts once, however often forward runs
    again."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None


with_gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = _WithGradient.apply  # typed
