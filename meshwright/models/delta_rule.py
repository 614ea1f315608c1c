"""The gated delta rule: a recurrent memory of keys and values, computed in chunks of tokens.

A head has a state S, a matrix of K x V. A token with query q, key k and value v, a decay a and a
strength b in (0, 1), changes it and reads it:

    S <- a S;  S <- S + b k (v - S^T k)^T;  out = S^T q

Within a chunk, the values that tokens write solve a triangular system; from chunk to chunk, the
state goes through an affine map, S <- P S + B. So all but the maps is products of matrices, for all
chunks at once. Source: Yang et al. 2024, arXiv:2412.06464, section 3.3 (gated delta rule), and
arXiv:2406.06484, section 3.2 (chunks).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 64
"""Tokens of a chunk. Fewer mean more maps from chunk to chunk, more mean larger systems."""

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys (transformers and FLA)."""


class Chunks(NamedTuple):
    """Sequences in N chunks of C tokens, fp32. The tokens of a document after the first of a chunk
    see nothing of the state before the chunk."""

    maps: Tensor
    """P, (B, H, N, K, K): the state after a chunk is P times the one before it, plus B."""
    additions: Tensor
    """B, (B, H, N, K, V)."""
    queries: Tensor
    """(B, H, N, C, K), times the decay since the chunk's start."""
    scores: Tensor
    """(B, H, N, C, C), of queries with the keys of the chunk up to them."""
    writes: Tensor
    """(B, H, N, C, V), the values that are written if the state before the chunk is zero."""
    reads: Tensor
    """(B, H, N, C, K), of which the product with the state before the chunk is subtracted."""


def normalize(x: Tensor) -> Tensor:
    """Return vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def split_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None = None,
    before: Tensor | None = None,
) -> Chunks:
    """Compute each chunk's part, which needs no state.

    Args:
        q, k: (B, S, G, K), of G heads, each of which serves H / G of the others.
        v: (B, S, H, V).
        decay: (B, S, H) fp32, logarithms, so not above 0.
        strength: (B, S, H).
        documents: (B, S) int, as `Decoder` takes them; None: one for each sequence.
        before: (B,) the document of the token before the first; None: there is no token.
    """
    shared, seq_len = v.shape[2] // q.shape[2], q.shape[1]
    length = min(CHUNK, seq_len)
    missing = -seq_len % length

    def chunked(x: Tensor) -> Tensor:  # (B, S, H, ...) -> (B, H, N, C, ...)
        x = x.transpose(1, 2).float()
        if missing:  # tokens of zeros change no state
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
        return x.unflatten(2, (-1, length))

    q, k = (normalize(x).repeat_interleave(shared, 2) for x in (q, k))
    q, k, v, decay, strength = (
        chunked(x) for x in (q * q.shape[-1] ** -0.5, k, v, decay, strength)
    )
    # in fp64: where decay is strong, sums are large, and their differences small
    total = decay.double().cumsum(-1)
    is_seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    since_start, to_end = total, total[..., -1:] - total
    if documents is not None:
        is_own, is_old, is_last = _same_documents(documents, before, missing, length)
        is_seen = is_seen & is_own
        since_start = since_start.masked_fill(~is_old, -torch.inf)
        to_end = to_end.masked_fill(~is_last, -torch.inf)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    # before exp, which would overflow: 0 times infinity has no gradient
    between = between.masked_fill(~is_seen, -torch.inf).float().exp()
    since_start, to_end = since_start.float().exp(), to_end.float().exp().unsqueeze(-1)
    strong_k = k * strength.unsqueeze(-1)
    right = torch.cat([v * strength.unsqueeze(-1), strong_k * since_start.unsqueeze(-1)], -1)
    # unitriangular: its diagonal isn't looked at
    solved = torch.linalg.solve_triangular(
        strong_k @ k.mT * between, right, upper=False, unitriangular=True
    )
    writes, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    late_k = (k * to_end).mT
    # the whole chunk's decay, or 0 if a document begins in it
    carried = torch.diag_embed(since_start[..., -1:].expand(*since_start.shape[:-1], k.shape[-1]))
    return Chunks(
        maps=carried - late_k @ reads,
        additions=late_k @ writes,
        queries=q * since_start.unsqueeze(-1),
        scores=q @ k.mT * between,
        writes=writes,
        reads=reads,
    )


def _same_documents(
    documents: Tensor, before: Tensor | None, missing: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether tokens are of the same document as each token of their chunk, (B, 1, N, C, C),
    as the last token before the chunk, and as the last of the chunk: (B, 1, N, C)."""
    if missing:
        documents = torch.cat([documents, documents[:, -1:].expand(-1, missing)], 1)
    own = documents.unflatten(1, (-1, length))  # (B, N, C)
    first = own[:, :1, 0] if before is None else before.unsqueeze(1)
    old = torch.cat([first, own[:, :-1, -1]], 1).unsqueeze(2)
    found = own.unsqueeze(3) == own.unsqueeze(2), own == old, own == own[:, :, -1:]
    is_own, is_old, is_last = (same.unsqueeze(1) for same in found)
    return is_own, is_old, is_last


def read_chunks(chunks: Chunks, states: Tensor) -> Tensor:
    """Return what the tokens read, (B, N C, H, V).

    Args:
        states: (B, H, N, K, V), before each chunk.
    """
    written = chunks.writes - chunks.reads @ states
    out = chunks.queries @ states + chunks.scores @ written
    return out.flatten(2, 3).transpose(1, 2)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the tokens read, (B, S, H, V) fp32, and the state after them, (B, H, K, V).

    Args:
        q, k, v, decay, strength, documents: as `split_in_chunks` takes them.
        state: before the first token; None: zeros.
    """
    chunks = split_in_chunks(q, k, v, decay, strength, documents)
    states, last = scan_states(chunks, state)
    return read_chunks(chunks, states)[:, : q.shape[1]], last


def scan_states(chunks: Chunks, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk, (B, H, N, K, V), and after the last, (B, H, K, V).

    Args:
        state: before the first chunk; None: zeros.
    """
    first = torch.zeros_like(chunks.additions[:, :, 0]) if state is None else state
    states: Tensor = scan(chunks.maps, chunks.additions, first)
    return states[:, :, :-1], states[:, :, -1]


# an operator: the compiler would write a line for each chunk
@torch.library.custom_op("meshwright::scan_affine", mutates_args=())
def scan(maps: Tensor, additions: Tensor, first: Tensor) -> Tensor:
    """(..., N, K, K), (..., N, K, V), (..., K, V) -> (..., N + 1, K, V): `first`, and what one map
    after the other makes of it."""
    count = maps.shape[-3]
    states = additions.new_empty(*additions.shape[:-3], count + 1, *additions.shape[-2:])
    states[..., 0, :, :] = first
    for number in range(count):
        before = states[..., number, :, :]
        states[..., number + 1, :, :] = (
            maps[..., number, :, :] @ before + additions[..., number, :, :]
        )
    return states


@scan.register_fake
def _(maps: Tensor, additions: Tensor, first: Tensor) -> Tensor:
    count = maps.shape[-3] + 1
    return additions.new_empty(*additions.shape[:-3], count, *additions.shape[-2:])


@torch.library.custom_op("meshwright::scan_affine_backward", mutates_args=())
def scan_backward(grad: Tensor, maps: Tensor) -> Tensor:
    """(..., N + 1, K, V), (..., N, K, K) -> (..., N + 1, K, V): the gradients of the states, to
    which later states pass on theirs."""
    found = grad.clone()
    for number in range(maps.shape[-3] - 1, -1, -1):
        found[..., number, :, :] += maps[..., number, :, :].mT @ found[..., number + 1, :, :]
    return found


@scan_backward.register_fake
def _(grad: Tensor, maps: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maps, states = ctx.saved_tensors
    whole = scan_backward(grad.contiguous(), maps)
    later = whole[..., 1:, :, :]
    return later @ states[..., :-1, :, :].mT, later.contiguous(), whole[..., 0, :, :].contiguous()


scan.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.scan_affine)
def _flops(maps: tuple[int, ...], additions: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * math.prod(maps) * additions[-1]


@register_flop_formula(torch.ops.meshwright.scan_affine_backward)
def _flops_backward(grad: tuple[int, ...], maps: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * math.prod(maps) * grad[-1]
