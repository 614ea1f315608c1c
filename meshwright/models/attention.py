"""Causal self-attention with grouped key and value heads; and inside documents, where a sequence is
made of several."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from meshwright.models.layers import Linear, OfHeads, RMSNorm, add_layers
from meshwright.models.rope_scaling import LinearScaling, RopeScaling, Yarn
from meshwright.models.sinks import sink_attention, with_sinks
from meshwright.models.table import AttentionSpec, RopeSpec

Mask = Tensor | BlockMask
"""Which keys each query sees: (B, 1, queries, keys) bool, or the same in blocks."""


def rope_cache(seq_len: int, rope: RopeSpec, device: torch.device | None = None) -> Tensor:
    """Return cosines and sines of position x frequency, with frequency_i = theta^(-2i / H).

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.

    Args:
        seq_len: positions 0 .. seq_len - 1.

    Returns:
        (2, seq_len, H/2) fp32, cosines first.
    """
    exponent = torch.arange(0, rope.head_dim, 2, dtype=torch.float32, device=device) / rope.head_dim
    frequency = 1.0 / rope.theta**exponent  # (H/2,)
    amplitude = 1.0
    match rope.scaling:
        case RopeScaling():
            frequency = _stretch_long(frequency, rope.scaling)
        case LinearScaling():
            frequency = frequency / rope.scaling.factor
        case Yarn():
            frequency = _stretch_by_yarn(frequency, rope.theta, rope.scaling)
            amplitude = rope.scaling.amplitude
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)
    both = torch.stack([angle.cos(), angle.sin()])
    return both if amplitude == 1.0 else both * amplitude


def _stretch_long(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide frequencies whose wavelength exceeds original / low by the factor, keep those below
    original / high, and mix the two linearly in original / wavelength in between.

    Source: Grattafiori et al. 2024, arXiv:2407.21783, and Meta's published code.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # turns within the original context
    periods = scaling.original_seq_len * frequency / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def _stretch_by_yarn(frequency: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Divide frequencies of few turns within the original context by the factor, keep those of
    many, and mix the two linearly in the number of the pair in between.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2, and the authors' code, which has the
    bounds 0 and H - 1, and 0.001 where the two are equal.

    Args:
        frequency: (H/2,), of which number i is theta^(-2i / H).
    """
    width = 2 * len(frequency)
    first, last = (  # the pair that makes so many turns
        width * math.log(yarn.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pair = torch.arange(len(frequency), dtype=torch.float32, device=frequency.device)
    stretched = ((pair - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequency / yarn.factor * stretched + frequency * (1 - stretched)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, S, N, H) -> (B, S, N, H)
    """Rotate each pair (x[2i], x[2i+1]) by its angle, in fp32; pairs lie as in Meta's weights.

    Args:
        cos, sin: (S, R/2) or (B, S, R/2) fp32, of the first R elements; others stay as they are.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([apply_rope(x[..., :width], cos, sin), x[..., width:]], -1)
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)  # (B, S, N, H/2) each
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


class CausalAttention(nn.Module):
    """softmax(scale Q K^T) V, where a position sees itself and those before it.

    The core of every attention: a module without parameters, named `attention.core`, so that
    context parallelism, generation and other kernels have one thing to replace. Whatever stands in
    its place takes these arguments and gives this result. Queries and keys come to it normalised
    and rotated, heads may be one rank's share, and it keeps nothing from one sequence to the next
    unless that is its purpose.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        sinks: Tensor | None = None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """(B, N, S, H), (B, K, S, H) twice -> (B, N, S, H); K divides N.

        Args:
            mask: of `Decoder.masks`: causal, and with the window as well; None: one document.
            sinks: (N,) fp32, as `sinks.py` has them; None: there are none.
            scale: of products of queries with keys.
            window: tokens that a token sees, with itself; None: all before.
            soft_cap: c, scores s become c tanh(s / c); None: they stay.
        """
        is_whole = window is None or window >= q.shape[2]
        if mask is None and is_whole and soft_cap is None:
            if sinks is None:
                return causal_attention(q, k, v, scale=scale)
            if not q.is_cuda:
                return sink_attention(q, k, v, None, sinks, scale=scale, is_causal=True)
        if mask is None:
            positions = torch.arange(q.shape[2], device=q.device)
            mask = is_seen(positions.unsqueeze(1), positions, window)
        return masked_attention(q, k, v, mask, sinks, scale=scale, soft_cap=soft_cap)


def is_seen(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return whether tokens at positions `query` see those at positions `key`: bool, broadcast."""
    is_before = query >= key
    return is_before if window is None else is_before & (query - key < window)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Causal attention as `CausalAttention` without a mask."""
    if q.is_cuda and q.dtype == torch.float32:
        # flash and cuDNN's kernels take 16 bits; the memory-efficient one has no grouped heads
        # (torch 2.13), and without it SDPA makes an S x S matrix
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped
    )


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, K, S, H) -> (B, N, S, H): each key or value head as often as query heads use it."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


class Attention(nn.Module):
    """Causal attention of N query heads over K key/value heads, with rotary positions.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries). Names are Meta's.
    """

    wq: Linear
    wk: Linear
    wv: Linear
    wg: Linear
    wo: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    sinks: OfHeads

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.head_dim, self.qk_norm, self.window = spec.head_dim, spec.qk_norm, spec.window
        self.scale = 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale
        self.soft_cap, self.is_gated = spec.soft_cap, spec.is_gated
        self.has_sinks = spec.sink_std is not None
        add_layers(self, spec.parameters, spec.norm_eps)
        self.core = CausalAttention()

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Mask | None = None
    ) -> Tensor:
        """(B, S, D) -> (B, S, D); without `cos` and `sin`, (S, R/2), positions aren't known."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        # the number of heads follows from the weights, so that each rank may hold some of them
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)  # (B, S, N or K, H)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, N or K, S, H)
        sinks = self.sinks(x) if self.has_sinks else None
        out = self.core(  # (B, N, S, H)
            q, k, v, mask, sinks, scale=self.scale, window=self.window, soft_cap=self.soft_cap
        )
        out = out.transpose(1, 2).flatten(-2)
        if self.is_gated:  # Qiu et al. 2025, arXiv:2505.06708
            out = out * torch.sigmoid(self.wg(x))
        return self.wo(out)


def positions_in_document(documents: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return how far each token is from the first of its document.

    Args:
        documents: (B, S) int, rising along a sequence.
        positions: (S/cp,) or (B, S/cp) int64 in the sequence, of the tokens that are asked about;
            None: of all.

    Returns:
        (B, S/cp) int64.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    start = (place * is_first).cummax(dim=1).values  # a place without a start counts 0
    return _at(place - start, positions)


def makes_blocks(device: torch.device) -> bool:
    """Return whether masks on `device` are blocks for flex attention."""
    return device.type == "cuda"


def dense_mask(
    documents: Tensor,
    positions: Tensor | None = None,
    window: int | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Return a causal mask inside documents, (B, 1, S/cp, keys) bool. Its memory grows with S^2.

    Args:
        documents: (B, S) int of whole sequences.
        positions: (S/cp,) or (B, S/cp) int64 in the sequence, of the queries; None: all.
        window: tokens that a token sees, with itself; None: all before.
        keys: (keys,) int64 positions of the keys, in any order; None: all S.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    own = _at(documents, positions).unsqueeze(2)  # (B, S/cp, 1)
    rows = (place if positions is None else positions).unsqueeze(-1)  # (S/cp, 1) or (B, S/cp, 1)
    columns = place if keys is None else keys
    is_own = own == _at(documents, keys).unsqueeze(1)
    return (is_own & is_seen(rows, columns, window)).unsqueeze(1)


@torch.no_grad()  # always: compiled, it would have a second graph for validation
def block_mask(
    documents: Tensor,
    positions: Tensor | None = None,
    window: int | None = None,
    keys: Tensor | None = None,
) -> BlockMask:
    """As `dense_mask`, in blocks of queries by keys that are seen in full, in part or not."""
    batch, seq_len = documents.shape
    place = torch.arange(seq_len, device=documents.device).expand(batch, -1)
    own, rows = _at(documents, positions), _at(place, positions)  # (B, S/cp) each
    others, columns = _at(documents, keys), _at(place, keys)  # (B, keys) each

    def is_in_mask(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = own[b, query] == others[b, key]
        return is_own & is_seen(rows[b, query], columns[b, key], window)

    create = _compiled(create_block_mask) if documents.is_cuda else create_block_mask
    device = documents.device
    return create(is_in_mask, batch, None, own.shape[1], others.shape[1], device=device)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """(B, N, queries, H), (B, K, keys, H) twice -> (B, N, queries, H); K divides N.

    Args:
        mask: None: every query sees every key.
        sinks, soft_cap: as `CausalAttention` takes them.
    """
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # flex attention, whose memory grows with S; within a compiled block it is compiled with
        # that
        is_eager = q.is_cuda and not torch.compiler.is_compiling()
        attend = _compiled(flex_attention) if is_eager else flex_attention
        options: dict[str, Any] = {} if soft_cap is None else {"score_mod": capped(soft_cap)}
        options |= {"block_mask": mask, "scale": scale, "enable_gqa": is_grouped}
        if sinks is None:
            return attend(q, k, v, **options)
        out, aux = attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return with_sinks(out, aux.lse, sinks)[0]  # its logarithms have a gradient
    if soft_cap is not None or (sinks is not None and q.is_cuda):
        # a matrix of all scores, where no kernel can: with soft caps on CPUs, and with sinks where
        # a GPU generates text
        scores = (q @ repeat_heads(k, q.shape[1]).mT * scale).float()
        if soft_cap is not None:
            scores = capped(soft_cap)(scores)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1).type_as(q) @ repeat_heads(v, q.shape[1])
        return out if sinks is None else with_sinks(out, scores.logsumexp(-1), sinks)[0]
    if sinks is not None:
        return sink_attention(q, k, v, mask, sinks, scale=scale)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )


@cache  # so that flex attention is given the same function each time, and compiled once
def capped(cap: float) -> Callable[..., Tensor]:
    """Return the function of scores s that gives c tanh(s / c), as flex attention takes it."""

    def cap_scores(scores: Tensor, *indices: Tensor) -> Tensor:
        return cap * torch.tanh(scores / cap)

    return cap_scores


def _at(values: Tensor, positions: Tensor | None) -> Tensor:
    """(B, S) at (S/cp,) or (B, S/cp) -> (B, S/cp)."""
    if positions is None:
        return values
    return values.gather(1, positions.expand(len(values), -1))


@cache  # not at import, which would take a second
def _compiled(function: Any) -> Any:
    """Compile a function of flex attention: uncompiled, it makes a whole (S, S) matrix first."""
    # Of two graphs that fit, dynamo would take the one that it used last. A block that is
    # recomputed in backward might then take another than it took in forward, and fail (pytorch
    # issue 166926, open in 2.13). Private: if it goes, see whether the issue is closed.
    with suppress(ImportError):
        from torch._C._dynamo import eval_frame

        getattr(eval_frame, "_set_lru_cache", lambda _: None)(False)
    # Visible as one operator, "higher_order.inductor_compiled_code", so that recomputation by op
    # can keep its output.
    return torch.compile(function, options={"wrap_inductor_compiled_regions": True})
