"""A microbatch, and the next-token loss of its hidden states, in chunks of tokens.

Full logits never exist.

The gradient of a chunk's logits is computed at once, and multiplied into the gradients of the
hidden states and of the weight: nothing is computed twice. Source: Hsu et al. 2024,
arXiv:2410.10989, section 3.2 (fused linear cross entropy); theirs adds the weight's gradient up in
its own type, and has chunks as large as the hidden states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of a position without loss."""

PADDING = -101
"""Label of a position that is no token: without loss, and routers don't count it."""


@dataclass(frozen=True, eq=False)  # tensors that are equal aren't one truth value
class Batch:
    """One microbatch of a rank."""

    tokens: Tensor
    """(B, S) int64."""
    labels: Tensor
    """(B, S) int64: the token that follows; `IGNORE` where that isn't to be learned,
    and `PADDING` where the position has no token."""
    documents: Tensor | None = None
    """(B, S) int32: which document of its sequence each token belongs to, rising from 0. None:
    attention doesn't stop between documents. Full under context parallelism, which shards the
    others."""
    sources: Tensor | None = None
    """(B,) int64: from which source of a mixture each sequence is. None: it isn't told."""
    loss_weights: Tensor | None = None
    """(B,) fp32: factors on the losses of each sequence. None: all are 1."""
    future_tokens: Tensor | None = None
    """(B, k, S) int64: at depth i, counted from 1, the token that is i after each position. None:
    the model predicts the next token only."""
    future_labels: Tensor | None = None
    """(B, k, S) int64: the token after that, as `labels`; `PADDING` where the document has no
    token so far away."""
    future_scales: Tensor | None = None
    """(B, k) fp32: factors on the gradients of the losses of `future_labels`. None: not known."""

    @property
    def optional(self) -> dict[str, Tensor]:
        """What there is of the parts that a model takes beside tokens and labels, by name."""
        names = "documents", "loss_weights", "future_tokens", "future_labels", "future_scales"
        parts = {name: getattr(self, name) for name in names}
        return {name: part for name, part in parts.items() if part is not None}

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the same on `device`."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the same in page-locked memory, from where copies to a device need not wait."""
        return self._each(Tensor.pin_memory)

    def send(self, device: torch.device) -> "Batch":
        """Return the same on `device`; the host doesn't wait for it."""
        batch = self.pin_memory() if device.type == "cuda" else self
        return batch.to(device, non_blocking=True)

    def rows(self, rows: slice) -> "Batch":
        """Return the batch of these sequences."""
        return self._each(lambda part: part[rows])

    def _each(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: move(part) for n, part in parts.items() if part is not None})


SMALL_LOGITS = 1 << 24
"""Elements of logits that need not be split further: 32 MiB in bf16."""

BLOCKS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Elements at a time, where there are temporaries for each: on CPUs they stay in the cache."""


class SummedLoss:
    """Cross entropy of the logits x weight^T, added up over the labels that count.

    Products are in the type of x. Sums over the vocabulary, and sums of the weight's gradient over
    chunks, are in fp32. A chunk's part of that gradient comes from one product and is rounded to
    the type of x; so is the result, as if the weight were cast outside, as FSDP2 does. Tensor
    parallelism puts a loss on parts of the vocabulary in its place.

    Args:
        chunk_tokens: tokens whose logits exist at once; 0: as many as the model is wide, half as
            many if the logits are in fp32, so that they take no more memory than the weight would
            in bf16; or as `SMALL_LOGITS` allows, if that is more.
        cap: c, logits z become c tanh(z / c); None: they stay.
    """

    def __init__(self, chunk_tokens: int = 0, cap: float | None = None) -> None:
        self.chunk_tokens, self.cap = chunk_tokens, cap
        self.num_ranks = 1
        self._log_sums, self._exponentiate = _log_sums_in_blocks, _exponentiate_in_blocks
        self._add: Callable[[Tensor, Tensor], object] = add_
        self.own: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Takes the place of cross entropy where gradients are needed: from hidden states (T, D),
        logits (T, V) fp32 and labels (T,) to the loss of each token, (T,). Autograd goes through
        it, chunk by chunk."""
        self.listen: Callable[[Tensor, Tensor], None] | None = None
        """Gets the loss of each token without its weight, 0 where there is none, and the labels:
        (B, S) each."""

    def compile(self, backend: Any) -> None:
        """Compile the passes over logits and gradients between matrix products.

        A process that meets more shapes than torch compiles for one function runs the others
        eagerly, and torch warns of it: with `fullgraph` it would raise an error.
        """
        self._log_sums = torch.compile(log_sums, backend=backend)
        self._exponentiate = torch.compile(exponentiate_, backend=backend)
        self._add = torch.compile(add_, backend=backend)

    def logits(self, x: Tensor, weight: Tensor, at: Tensor | None = None) -> Tensor:
        """(B, S, D), (V, D) -> (B, S, V): for generation, and to compare with other code.

        Args:
            at: (B,) int64, a position in each sequence. Only its logits are computed: (B, 1, V).
        """
        logits = F.linear(rows_at(x, at), weight.to(x.dtype))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        """(B, S, D), (V, D), (B, S) -> () fp32; differentiable once, by `x` and `weight`.

        Args:
            labels: int64; `IGNORE` and `PADDING` mark positions without loss. The loss of any other
                label that isn't in the vocabulary is infinite.
            loss_weights: (B,) fp32, positive factors on the losses of each sequence; None: 1.

        Raises:
            ValueError: if `labels` isn't `x` without its last dimension.
        """
        losses, gradient = self.of_tokens(x, weight, labels, loss_weights)
        if self.listen is not None:
            self.listen(losses, labels)
        weighted = losses if loss_weights is None else losses * loss_weights.unsqueeze(1)
        return weighted.sum() + gradient

    def with_future(
        self, x: Tensor, weight: Tensor, labels: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        """((1 + k) B, S, D), (V, D), ((1 + k) B, S) -> the loss of the first B sequences, () fp32,
        and the losses of the k depths that follow, (k,) fp32.

        All share one pass over the weight. The first result has the gradients of all, and the
        second has none.

        Args:
            scales: (B, k) factors on the gradients of the losses of each depth.
        """
        size, depth = scales.shape
        factors = torch.cat([scales.new_ones(1, size), scales.t()]).flatten()  # of sequences
        losses, gradient = self.of_tokens(x, weight, labels, factors)
        if self.listen is not None:
            self.listen(losses[:size], labels[:size])
        return losses[:size].sum() + gradient, losses[size:].view(depth, -1).sum(1)

    def of_tokens(
        self, x: Tensor, weight: Tensor, labels: Tensor, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, S, D), (V, D), (B, S) -> the loss of each token, (B, S) fp32, without a gradient; and
        () fp32, a zero that has the gradient of their sum.

        Args:
            factors: (B,) on the gradients of the losses of each sequence; None: 1.
        """
        chunk_tokens = self.tokens_per_chunk(weight, x.dtype)
        return self.of_rows(x, weight, labels, factors, chunk_tokens=chunk_tokens)

    def tokens_per_chunk(self, weight: Tensor, dtype: torch.dtype) -> int:
        """Return the size of chunks for a whole weight, (V, D), and logits of a type: the same on
        any mesh."""
        vocab_size, dim = weight.shape
        # in fp32 as many bytes as in bf16: products hide the more frequent passes over W's gradient
        return self.chunk_tokens or max(2 * dim // dtype.itemsize, SMALL_LOGITS // vocab_size)

    def of_rows(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        factors: Tensor | None = None,
        *,
        chunk_tokens: int,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The same, where `weight` has the rows of the vocabulary from `first` on."""
        if x.shape[:-1] != labels.shape:
            raise ValueError(f"states {tuple(x.shape)} and labels {tuple(labels.shape)} disagree")
        needed = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
        losses, of_x, of_weight = _differentiate(
            x.flatten(0, 1).detach(),
            weight.detach().to(x.dtype),
            labels.flatten(),
            None if factors is None else factors.repeat_interleave(labels.shape[1]),
            first,
            self,
            chunk_tokens,
            needed,
        )
        zero = losses.new_zeros(())
        # One node for each gradient: schedules that split backward start the weight's part at the
        # node where both meet, and torch 2.11 takes only its own nodes there, like additions. The
        # caller adds once more: hooks of FSDP2 on the output mustn't be called again at that part.
        with_gradient: Callable[..., Tensor] = _WithGradient.apply
        for tensor, gradient in ((x, of_x), (weight, of_weight)):
            if gradient is not None:
                zero = zero + with_gradient(tensor, gradient.view(tensor.shape), x.dtype)
        return losses.view(labels.shape), zero

    def join(self, log_sum: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """From these rows of the vocabulary to all: the log of the sum of exponentials, and the
        label's logit, which is -inf where the label isn't among the rows; each (tokens,)."""
        return log_sum, own

    def measure(self, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arguments of `join`, from logits (tokens, rows) and the labels' rows."""
        at = places.clamp(0, logits.shape[1] - 1)
        own = logits.gather(1, at.unsqueeze(1)).squeeze(1).float()
        return self._log_sums(logits), own.where(at == places, -torch.inf)

    def differentiate_(
        self,
        logits: Tensor,
        places: Tensor,
        own: Tensor,
        log_sum: Tensor,
        factors: Tensor | None = None,
    ) -> None:
        """Replace `logits` by the gradient of the loss with respect to them.

        Args:
            own: as `measure` gives it for these rows.
            log_sum: over all rows; inf where the label doesn't count.
            factors: (tokens,) fp32, on each token's loss; None: 1.
        """
        # f p = exp(z - (log sum - log f)), so factors take no pass over logits of their own
        self._exponentiate(logits, log_sum if factors is None else log_sum - factors.log())
        tokens = torch.arange(len(logits), device=logits.device)
        at = places.clamp(0, logits.shape[1] - 1)
        # from the logit in fp32: probability - 1 of a probability that was rounded has lost bits
        of_label = (own - log_sum).exp() - 1
        if factors is not None:
            of_label = of_label * factors
        of_label = of_label.to(logits.dtype)
        logits[tokens, at] = torch.where(at == places, of_label, logits[tokens, at])

    def all_rows(self, logits: Tensor) -> Tensor:
        """Return (tokens, V) logits, from the columns of these rows of the vocabulary."""
        return logits

    def differentiate_own_(
        self, x: Tensor, logits: Tensor, labels: Tensor, first: int, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Replace `logits` by the gradient of the user's loss with respect to them. Return the loss
        of each token, and its gradient with respect to `x`, if it looks at that.

        Args:
            first: of the rows of the vocabulary that `logits` are of.
            factors: (tokens,) on the losses, for the gradients only; None: 1.
        """
        assert self.own is not None
        is_counted = has_loss(labels)
        with torch.enable_grad():
            states = x.detach().requires_grad_()
            whole = self.all_rows(logits).detach().float().requires_grad_()
            losses = self.own(states, whole, labels.where(is_counted, 0)).float()
            weighted = losses if factors is None else losses * factors
            total = weighted.where(is_counted, 0.0).sum()
            of_states, of_logits = torch.autograd.grad(
                total, (states, whole), allow_unused=True, materialize_grads=False
            )
        of_logits = torch.zeros_like(whole) if of_logits is None else of_logits
        logits.copy_(of_logits[:, first : first + logits.shape[1]])
        # a row without a label may have given no number; not in place: torch won't let a sum's
        # gradient be written to, which has the memory of one element for a row
        logits.masked_fill_(~is_counted.unsqueeze(1), 0.0)
        if of_states is not None:
            of_states = of_states.where(is_counted.unsqueeze(1), 0.0)
        return losses.detach().where(is_counted, 0.0), of_states

    def add_product(self, total: Tensor, gradient: Tensor, x: Tensor, *, is_first: bool) -> None:
        """Add gradient^T x, (tokens, rows) and (tokens, D), to `total`, (rows, D) fp32.

        Args:
            is_first: `total` isn't there yet.
        """
        if x.dtype == total.dtype:  # one call multiplies and adds
            total.addmm_(gradient.t(), x, beta=0 if is_first else 1)
            return
        size = _block_size(total)
        for part, own in zip(total.split(size), gradient.split(size, dim=1), strict=True):
            product = own.t() @ x
            part.copy_(product) if is_first else self._add(part, product)


@torch.no_grad()
def _differentiate(
    x: Tensor,  # (tokens, D)
    weight: Tensor,  # (rows, D)
    labels: Tensor,  # (tokens,)
    factors: Tensor | None,  # (tokens,)
    first: int,
    loss: SummedLoss,
    chunk_tokens: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the losses and, from the same pass, the gradients of their sum by `x` and (in fp32) by
    `weight`; each loss's times its factor."""
    needs_x, needs_weight = needed
    of_x = torch.empty_like(x) if needs_x else None
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    # the same memory for all chunks: on CPUs new memory costs as much as the product
    memory = x.new_empty(min(chunk_tokens, len(x)), len(weight))
    # after the memory that ends with this function: on CPUs the weight's cast and the logits leave
    # one hole, where the embedding's gradient fits
    of_weight = torch.empty_like(weight, dtype=torch.float32) if needs_weight else None
    for start in range(0, len(x), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        is_counted, places = has_loss(labels[chunk]), labels[chunk] - first
        logits = torch.mm(x[chunk], weight.t(), out=memory[: len(places)])
        if loss.cap is not None:
            logits.div_(loss.cap).tanh_().mul_(loss.cap)
        slope = None
        if loss.cap is not None and (needs_x or needs_weight):
            slope = 1 - (logits / loss.cap).square_()  # of c tanh(z / c)
        of_states, of_chunk = None, None if factors is None else factors[chunk]
        if loss.own is not None and (needs_x or needs_weight):
            losses[chunk], of_states = loss.differentiate_own_(
                x[chunk], logits, labels[chunk], first, of_chunk
            )
        else:
            log_sum, own = loss.measure(logits, places)
            log_sum_of_all, own_of_all = loss.join(log_sum, own)
            losses[chunk] = torch.where(is_counted, log_sum_of_all - own_of_all, 0.0)
            if not (needs_x or needs_weight):
                continue
            log_sum = log_sum_of_all.where(is_counted, torch.inf)
            loss.differentiate_(logits, places, own, log_sum, of_chunk)
        if slope is not None:
            logits.mul_(slope)
        if of_x is not None:
            torch.mm(logits, weight, out=of_x[chunk])
            if of_states is not None:  # each of the ranks that have rows has the same
                of_x[chunk] += of_states / loss.num_ranks
        if of_weight is not None:
            loss.add_product(of_weight, logits, x[chunk], is_first=start == 0)
    return losses, of_x, of_weight


class _WithGradient(torch.autograd.Function):
    """0, whose gradient by a tensor is known. It is scaled where it lies, if the tensor is of its
    type: autograd takes a second backward for an error."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor, rounded_to: torch.dtype) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype, ctx.rounded_to = tensor.dtype, rounded_to
        return torch.zeros((), device=tensor.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        is_own_type = gradient.dtype == ctx.dtype
        scaled = gradient if is_own_type else torch.empty_like(gradient, dtype=ctx.dtype)
        if gradient.dtype == ctx.rounded_to:
            # CUDA would round a factor without dimensions to the type of `gradient` first
            factor = grad if grad.device.type == "cpu" else grad.view([1] * gradient.dim())
            torch.mul(gradient, factor, out=scaled)
        else:
            size = _small_block_size(gradient)
            for part, into in zip(gradient.split(size), scaled.split(size), strict=True):
                product = part * grad  # copying rounds as well
                into.copy_(product if ctx.dtype == ctx.rounded_to else product.to(ctx.rounded_to))
        return scaled, None, None


def has_loss(labels: Tensor) -> Tensor:
    """Return whether each label counts in the loss."""
    return (labels != IGNORE) & (labels != PADDING)


def rows_at(x: Tensor, at: Tensor | None) -> Tensor:
    """(B, S, D), (B,) -> (B, 1, D); without positions all of `x`."""
    return x if at is None else x[torch.arange(len(at), device=x.device), at].unsqueeze(1)


def log_sums(logits: Tensor) -> Tensor:  # (tokens, rows) -> (tokens,) fp32
    return logits.float().logsumexp(-1)


def exponentiate_(logits: Tensor, log_sum: Tensor) -> None:  # (tokens, rows), (tokens,)
    """Replace `logits` by probabilities."""
    logits.copy_((logits.float() - log_sum.unsqueeze(1)).exp())


def add_(total: Tensor, part: Tensor) -> None:
    """Add `part`, maybe of a different type, to `total`; compiled, that needs no copy of it."""
    total.add_(part)


def _log_sums_in_blocks(logits: Tensor) -> Tensor:
    log_sum = torch.empty(len(logits), device=logits.device)
    for block, into, scratch in _with_scratch(logits, log_sum):
        largest = scratch.copy_(block).amax(-1)
        scratch.sub_(largest.unsqueeze(1)).exp_()
        torch.sum(scratch, -1, out=into)
        into.log_().add_(largest)
    return log_sum


def _exponentiate_in_blocks(logits: Tensor, log_sum: Tensor) -> None:
    for block, sums, scratch in _with_scratch(logits, log_sum):
        block.copy_(scratch.copy_(block).sub_(sums.unsqueeze(1)).exp_())


def _with_scratch(logits: Tensor, per_token: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of `logits`, of `per_token`, and fp32 memory for each block, the same for all: to get
    memory anew takes longer on a CPU than to compute in it."""
    size = _small_block_size(logits)
    scratch = torch.empty(min(size, len(logits)), logits.shape[1], device=logits.device)
    for block, part in zip(logits.split(size), per_token.split(size), strict=True):
        yield block, part, scratch[: len(block)]


def _block_size(matrix: Tensor) -> int:
    """Rows of a matrix that make a block."""
    return max(1, BLOCKS.get(matrix.device.type, BLOCKS["cpu"]) // matrix.shape[1])


def _small_block_size(matrix: Tensor) -> int:
    """Rows of a block that lies in a CPU's cache next to fp32 and rounded copies of it."""
    return max(1, _block_size(matrix) // 4)
