"""A feed-forward of many experts, of which each token goes through a few."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from meshwright.models.layers import FeedForward, Linear
from meshwright.models.router import (
    BalanceLosses,
    Router,
    choose_experts,
    load_of_sequences,
    mean_one,
    own_losses,
    tally,
    with_gradient,
)
from meshwright.models.table import MixtureSpec


class Experts(nn.Module):
    """The experts' weights, one stacked tensor for each of a feed-forward's three; and biases.

    `compute` takes the experts' inputs sorted by expert, so that expert parallelism has one thing
    to replace.
    """

    def __init__(self, spec: MixtureSpec) -> None:
        super().__init__()
        self.names, self.activation = tuple(spec.experts), spec.activation
        for name, parameter in spec.experts.items():
            self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
        self.compute: Callable[..., Tensor] = feed_forward

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """(R, D) -> (R, D): the first counts[0] rows go through expert 0, and so on.

        Args:
            counts: (E,) int64; they add up to R.
        """
        weights = [getattr(self, name) for name in self.names]
        return self.compute(rows, counts, self.activation, *weights)


def feed_forward(rows: Tensor, counts: Tensor, activation: str, *weights: Tensor) -> Tensor:
    """Gated feed-forward of (R, D) rows that are sorted by expert.

    Args:
        activation: as in `MixtureSpec`.
        weights: w1, w2 and w3, and maybe their biases: (E, F, D), (E, D, F), (E, F, D), (E, F),
            (E, D) and (E, F).
    """
    cast, ends = [weight.to(rows.dtype) for weight in weights], counts.cumsum(0).int()
    matrices, biases = cast[:3], cast[3:]
    if biases:
        of_each, every = (torch.arange(len(x), device=x.device) for x in (counts, rows))
        expert = of_each.repeat_interleave(counts, output_size=len(rows))
        starts = F.pad(ends[:-1], (1, 0)).long()

    def product(x: Tensor, number: int) -> Tensor:
        out = grouped_matmul(x, matrices[number], ends, is_transposed=True)
        return out + spread(biases[number], expert, every, starts) if biases else out

    gate, up = product(rows, 0), product(rows, 2)
    hidden = F.silu(gate) * up if activation == "swiglu" else clamped_swiglu(gate, up)
    return product(hidden, 1)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) gate sigmoid(1.702 gate), where no input is large. Source: OpenAI 2025,
    arXiv:2508.10925, and its published code."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


class Mixture(nn.Module):
    """Each token's output is the weighted sum of its K experts', and that of a shared one if any.

    No token is dropped, however many choose one expert. Forward has no side effect: its block may
    be computed again, and `Decoder` notes its results once. Source: Shazeer et al. 2017,
    arXiv:1701.06538.

    Attributes:
        bias: (E,) fp32, added to scores for the choice only; part of checkpoints.
        load: (E,) int64, of the last step: tokens of each expert, but for padding; part of
            checkpoints.
        counts: (E,) int64, the same of this step so far, on this rank.
        `figures`: (4,) fp32, of `own_losses` in this step so far, on this rank.
        losses: of this layer.
        bias_update_rate: by which a step moves `bias` towards even loads; 0: it stays.
        sum_over_ranks: adds up integers over the ranks that have parts of the same sequences.
    """

    bias: Tensor
    load: Tensor
    counts: Tensor
    figures: Tensor

    def __init__(self, spec: MixtureSpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec.dim, spec.n_experts, bias=spec.bias_std is not None)
        self.experts = Experts(spec)
        self.shared = FeedForward(spec.shared) if spec.shared else None
        self.shared_gate = Linear(spec.dim, 1, bias=False) if spec.is_shared_gated else None
        for name, state in spec.state.items():
            dtype = getattr(torch, state.dtype)
            self.register_buffer(name, torch.full(state.shape, state.value, dtype=dtype))
        counts = torch.zeros(spec.n_experts, dtype=torch.int64)
        self.register_buffer("counts", counts, persistent=False)
        self.register_buffer("figures", torch.zeros(4), persistent=False)
        self.losses, self.bias_update_rate = BalanceLosses(), 0.0
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts

    def forward(
        self, x: Tensor, chosen: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, S, D) -> (B, S, D), the router's choice of experts, (B, S, K) int64, and metrics.

        Args:
            chosen: (B, S, K) experts to take in the place of the router's choice. Then the last
                result is by how much, at most, the scores of a token's choice and of its given
                experts differ in sum, () fp32; otherwise None.
            counted: (B S,) bool, tokens that count in loads and losses; None: all.
        """
        spec, tokens = self.spec, x.flatten(0, 1)
        logits = self.router(tokens)
        is_softmax = spec.scores == "softmax"
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        biased, gap = scores.detach() + self.bias, None
        choice = choose_experts(
            biased, spec.n_active, spec.n_groups, spec.n_active_groups, spec.n_best
        )
        if chosen is None:
            chosen = choice
        else:
            chosen = chosen.flatten(0, 1)
            gap = (biased.gather(1, choice).sum(1) - biased.gather(1, chosen).sum(1)).abs().amax()
        weights = scores.gather(1, chosen)  # (T, K)
        if spec.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.normalizer_eps)
        losses, of_batch, of_sequence = self.losses, mean_one(self.load), None
        if losses.sequence:
            of_sequence = load_of_sequences(
                chosen, len(x), spec.n_experts, self.sum_over_ranks, counted
            )
        gradient, figures = own_losses(
            logits, scores, losses, of_batch, of_sequence, counted, is_softmax=is_softmax
        )
        if gradient is not None:
            weights = with_gradient(weights, logits, gradient)
        order = chosen.flatten().argsort(stable=True)  # of slots (token, k), by expert
        place = inverse(order).view(chosen.shape)
        rows = spread(tokens, order // spec.n_active, place, None)  # (T K, D)
        out = self.experts(rows, tally(chosen, spec.n_experts))
        y = combine(out, (weights * spec.scale).to(x.dtype), order, place).view(x.shape)
        choice = choice.unflatten(0, x.shape[:2])
        return (y if self.shared is None else y + self._share(x, tokens)), choice, figures, gap

    def _share(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the shared feed-forward's output for (B, S, D), which are (T, D) `tokens`."""
        assert self.shared is not None
        out = self.shared(x)
        if self.shared_gate is None:
            return out
        return out * torch.sigmoid(self.shared_gate(tokens)).view(*x.shape[:2], 1)

    @torch.no_grad()
    def note(self, chosen: Tensor, figures: Tensor, counted: Tensor | None) -> None:
        """Add a forward's results to the results of the step; (B, S, K), (4,) and (B S,)."""
        self.counts += tally(chosen.flatten(0, 1), self.spec.n_experts, counted)
        self.figures += figures


def inverse(order: Tensor) -> Tensor:  # (N,) int64, a permutation
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Spread(torch.autograd.Function):
    """(N, D) -> (R, D): row i is rows[index[i]]. Backward also reads, and adds up the gradients of
    each of the N in order: no atomic additions, whose order is arbitrary.

    Args:
        place: where each of the N is in the result, (N, K) int64; or (R,), the places of one after
            rows of the one before, which start at `starts`, (N,).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, index: Tensor, place: Tensor, starts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(place, starts)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        place, starts = ctx.saved_tensors
        return F.embedding_bag(place, grad.contiguous(), starts, mode="sum"), None, None, None


class _Combine(torch.autograd.Function):
    """(T K, D) -> (T, D): the sum of each token's K rows, which lie at `place`, in their order and
    by their weights, (T, K). Nothing of K rows per token is made, but the gradient of `rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, place)
        # detached: torch would note more for a separate gradient
        rows, weights = rows.detach(), weights.detach()
        return F.embedding_bag(place, rows, mode="sum", per_sample_weights=weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, place = ctx.saved_tensors
        of_rows = grad.index_select(0, order // place.shape[1])
        of_weights = torch.linalg.vecdot(of_rows, rows)[place]
        return of_rows.mul_(weights.flatten()[order].unsqueeze(1)), of_weights, None, None


# typed
spread: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = _Spread.apply
combine: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _Combine.apply

ALIGNMENT = 16
"""Bytes: torch's grouped matmul takes rows whose stride is a multiple (2.13)."""

GROUPED_TYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
"""Types that torch multiplies in groups, by device."""


def leaves_memory(device: torch.device) -> bool:
    """Return whether torch's product of a group without rows may be old memory, and not 0: on
    Blackwell it is (cutlass issue 2674, pytorch issue 172439). Of GPUs, only Hopper was tried."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)


# torch's own, under a name that compiles and is traced in fp32 too: its shape rule takes bf16 only
# (2.13)
@torch.library.custom_op("meshwright::grouped_matmul", mutates_args=())
def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor, *, is_transposed: bool = False) -> Tensor:
    """(R, in), (E, in, out) -> (R, out): rows up to ends[0] by b[0], and so on; or (in, R),
    (R, out) -> (E, in, out): the product of the columns and rows of each group, zeros without any.

    Where torch doesn't multiply in groups, a loop does, to equal results: as where there are no
    rows at all, on a rank whose experts nobody chose (pytorch pull request 192497).

    Args:
        ends: (E,) int32, ascending; the last is R.
        is_transposed: `b` is (E, out, in), as weights are; only so it is differentiable. The
            compiler would copy a transposed weight that is cast.
    """
    is_by_rows = b.dim() == 3
    sizes = b.shape[1:] if is_by_rows else (a.shape[0], b.shape[1])
    is_aligned = all(size * a.itemsize % ALIGNMENT == 0 for size in sizes)
    has_type = a.dtype in GROUPED_TYPES.get(a.device.type, ())
    b = b.mT if is_transposed else b
    if is_aligned and has_type and a.numel():
        out = F.grouped_mm(a, b, offs=ends)
        if not is_by_rows and leaves_memory(a.device):
            out.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0).view(-1, 1, 1), 0)
        return out
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if is_by_rows:
        return torch.cat([part @ own for part, own in zip(a.split(counts), b, strict=True)])
    parts = zip(a.split(counts, 1), b.split(counts), strict=True)
    return torch.stack([columns @ rows for columns, rows in parts])


@grouped_matmul.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor, *, is_transposed: bool = False) -> Tensor:
    groups = () if b.dim() == 3 else (len(ends),)
    return a.new_empty(*groups, a.shape[0], b.shape[1 if is_transposed else -1])


def _save(
    ctx: Any, inputs: tuple[Tensor, ...], keyword_only_inputs: dict[str, bool], output: Tensor
) -> None:
    assert keyword_only_inputs["is_transposed"]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()  # an expanded one, as of a sum, is rejected
    return grouped_matmul(grad, weight, ends), grouped_matmul(grad.t(), rows, ends), None


grouped_matmul.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.grouped_matmul)
def _flops(
    a: tuple[int, ...], b: tuple[int, ...], *_: Any, is_transposed: bool = False, **__: Any
) -> int:
    return 2 * a[0] * a[1] * b[1 if is_transposed else -1]
