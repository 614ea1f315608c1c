"""Context parallelism: each rank has a part of every sequence, and sees the keys of all."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from meshwright.config.parallelism import Parallelism
from meshwright.config.training import Training
from meshwright.models.batch import Batch
from meshwright.models.decoder import Decoder
from meshwright.models.document_mask import Mask, masked_attention
from meshwright.parallelisms.meshes import all_gather, reduce_scatter
from meshwright.parallelisms.ring_attention import (
    SEQUENCE,
    efficient_kernels,
    is_available,
    kernels,
    ring_attention,
    torch_ring,
)

Part = tuple[Tensor, Tensor]
"""Attention to some of the keys: (B, N, queries, H), and its logarithms, (B, N, queries) fp32."""


WIDTHS = 8
"""The kernels of GPUs take heads whose width is a multiple of this."""


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: tuple[int, int],
    *,
    mesh: DeviceMesh | None = None,
    scale: float | None = None,
    is_flash: bool = True,
) -> Tensor:
    """Return (B, N, S/cp, H): attention of the queries to all keys up to their own position.

    Collective over `mesh`, in forward and backward.

    Args:
        q: (B, N, S/cp, H), two chunks of equal length, one after the other.
        k: (B, K, S/cp, H), at the positions of `q`; K divides N.
        v: as `k`.
        chunks: numbers of the two chunks among the equal chunks of the sequence.
        mesh: the cp axis; None: `k` and `v` are those of all ranks, in the order of positions.
        scale: of products of queries with keys; None: H^-1/2.
        is_flash: on GPUs, whether flash attention takes it; memory-efficient attention if not.
    """
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale  # of the heads, without padding
    if q.is_cuda and width % WIDTHS:
        q, k, v = (F.pad(x, (0, -width % WIDTHS)) for x in (q, k, v))
    apply: Callable[..., Tensor] = _GatheredAttention.apply
    return apply(q, k, v, chunks, mesh, is_flash, scale)[..., :width]


class _GatheredAttention(torch.autograd.Function):
    """The fused kernels return the logarithms but no gradient of them, hence a backward of ours."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunks: tuple[int, int],
        mesh: DeviceMesh | None,
        is_flash: bool,
        scale: float,
    ) -> Tensor:
        own = k, v
        if mesh is not None:
            k, v = gather(torch.stack([k, v]), mesh).unbind(0)
        attend, _ = kernels(q) if is_flash else efficient_kernels()
        outputs, sums = [], []
        for queries, seen in zip(q.chunk(2, SEQUENCE), _keys(q, chunks), strict=True):
            parts: list[Part] = []
            for keys, is_causal in seen:
                out, logsumexp, *_ = attend(
                    queries, k[:, :, keys], v[:, :, keys], is_causal=is_causal, scale=scale
                )
                parts.append((out, logsumexp))
            out, logsumexp = functools.reduce(_merge, parts)
            outputs.append(out)
            sums.append(logsumexp.contiguous())
        output = torch.cat(outputs, SEQUENCE)
        ctx.save_for_backward(q, *own, output, *sums)
        ctx.options = chunks, mesh, is_flash, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, *sums = ctx.saved_tensors
        chunks, mesh, is_flash, scale = ctx.options
        if mesh is not None:
            # The compiler would move a gather without a gradient to forward, and keep its result.
            # So a few numbers of the gradient are gathered too.
            ahead = grad[0, 0, 0]
            mine = torch.cat([torch.stack([k, v]).flatten(), ahead]).unsqueeze(0)
            parts = all_gather(mine, mesh)[:, : -len(ahead)]
            k, v = _in_order(parts.unflatten(1, (2, *k.shape))).unbind(0)
        _, backward = kernels(q) if is_flash else efficient_kernels()
        # of no element are there more than two parts, so that 16-bit sums, too, are rounded once
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        by_chunk = [x.chunk(2, SEQUENCE) for x in (grad_q, grad, q, output)]
        for into, grad_out, queries, out, logsumexp, seen in zip(
            *by_chunk, sums, _keys(q, chunks), strict=True
        ):
            for keys, is_causal in seen:
                of_q, of_k, of_v, *_ = backward(
                    grad_out=grad_out,
                    query=queries,
                    key=k[:, :, keys],
                    value=v[:, :, keys],
                    out=out,
                    logsumexp=logsumexp,  # of all keys: so the parts' gradients add up
                    is_causal=is_causal,
                    scale=scale,
                )
                into += of_q
                grad_k[:, :, keys] += of_k
                grad_v[:, :, keys] += of_v
        if mesh is not None:
            grad_k, grad_v = _scatter(torch.stack([grad_k, grad_v]), mesh).unbind(0)
        return grad_q, grad_k, grad_v, None, None, None, None


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(2, B, K, S/cp, H) -> (2, B, K, S, H), in the order of positions."""
    return _in_order(all_gather(x, mesh).unflatten(0, (mesh.size(), 2)))


def _in_order(parts: Tensor) -> Tensor:
    """(cp, 2, B, K, S/cp, H) -> (2, B, K, S, H)."""
    early, late = parts.chunk(2, dim=-2)  # chunks 0 .. cp-1, and 2 cp - 1 .. cp
    return torch.cat([*early.unbind(0), *late.flip(0).unbind(0)], dim=-2)


def _scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(2, B, K, S, H) -> (2, B, K, S/cp, H): the sum over ranks, at this rank's positions."""
    chunks = x.chunk(2 * mesh.size(), dim=-2)
    parts = [torch.cat([chunks[rank], chunks[-1 - rank]], -2) for rank in range(mesh.size())]
    return reduce_scatter(torch.cat(parts), mesh)


def _keys(q: Tensor, chunks: tuple[int, int]) -> list[list[tuple[slice, bool]]]:
    """For each chunk of `q`, the keys that it sees, and whether causally: its own, and before."""
    length = q.shape[SEQUENCE] // 2
    return [
        [(slice(chunk * length, (chunk + 1) * length), True)]
        + ([(slice(0, chunk * length), False)] if chunk else [])
        for chunk in chunks
    ]


def _merge(a: Part, b: Part) -> Part:
    """Attention to the keys of both, and its logarithms, from that to the keys of each."""
    (out_a, sum_a), (out_b, sum_b) = a, b
    weight = torch.sigmoid(sum_b - sum_a).unsqueeze(-1)
    out = torch.lerp(out_a.float(), out_b.float(), weight).to(out_a.dtype)
    return out, torch.logaddexp(sum_a, sum_b)


def local_positions(seq_len: int, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Return which of the positions 0 .. S-1 this rank of the cp axis has: (S/cp,) int64.

    The sequence is cut into 2 cp chunks; rank r has chunks r and 2 cp - 1 - r. With causal
    attention that is the same work for every rank, where neighbouring chunks would give the last
    rank most of it. Source: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2.
    """
    if mesh.size() == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def local_part(batch: Batch, positions: Tensor) -> Batch:
    """Return the tokens and labels at `positions` of every sequence.

    `documents` stays whole: masking a query needs the document ids of all keys.
    """
    return Batch(batch.tokens[:, positions], batch.labels[:, positions], batch.documents)


def apply_cp(model: Decoder, mesh: DeviceMesh, training: Training, parallelism: Parallelism) -> str:
    """Make the attention of every block in `model` span the cp axis `mesh`, in place.

    Queries stay; keys and values are gathered or sent on from rank to rank, as
    `parallelism.context_parallel_attention` says. Collective in forward and backward.

    Returns:
        A line for the log.
    """
    dtype = getattr(torch, training.mixed_precision_param)
    has_kernel = is_available(mesh.device_type, dtype, model.table.head_dim)
    uses_ring = parallelism.context_parallel_attention == "ring"
    ring = mesh.get_group().group_name if uses_ring else None
    if uses_ring:
        torch_ring()  # if torch has moved it, that shows here
    # one for all blocks, so that they share a graph
    shared = functools.partial(attend, mesh=mesh, ring=ring, has_kernel=has_kernel)
    for block in model.layers.values():
        core = block.get_submodule("attention.core")
        core.forward = shared
    way = "go from rank to rank" if uses_ring else "are gathered"
    return f"context parallelism: sequences cut in {mesh.size()}; keys and values {way}"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    mesh: DeviceMesh,
    ring: str | None,
    has_kernel: bool = True,
) -> Tensor:
    """(B, N, S/cp, H), (B, K, S/cp, H), (B, K, S/cp, W) -> (B, N, S/cp, W).

    It keeps the contract of `CausalAttention`.

    Args:
        mask: of this rank's queries and all keys; None: only causal.
        ring: name of the group of `mesh` if keys and values are to go around, where they can.
        has_kernel: `ring_attention.is_available` for these heads in 16 bits.
    """
    # on GPUs flash attention takes no fp32, which `fp32_modules` may have made of this layer
    is_flash = has_kernel and not (q.is_cuda and q.dtype == torch.float32)
    width = v.shape[-1]
    if q.shape[-1] != width:  # zeros change neither scores nor other columns
        widest = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if ring is not None and mask is None and is_flash:
        return ring_attention(q, k, v, ring, scale)[0][..., :width]
    rank, size = mesh.get_local_rank(), mesh.size()
    chunks = (rank, 2 * size - 1 - rank)
    if mask is None:
        attended = gathered_attention(q, k, v, chunks, mesh=mesh, scale=scale, is_flash=is_flash)
        return attended[..., :width]
    k, v = gather(torch.stack([k, v]), mesh).unbind(0)  # (B, K, S, H)
    if isinstance(mask, BlockMask):  # skips later keys by itself
        return masked_attention(q, k, v, mask, scale=scale)[..., :width]
    length = q.shape[2] // 2
    outputs = []
    for part, chunk in enumerate(chunks):
        rows = slice(part * length, (part + 1) * length)
        seen = slice(0, (chunk + 1) * length)  # no key that comes later
        keys, values = k[:, :, seen], v[:, :, seen]
        part_mask = mask[:, :, rows, seen]
        outputs.append(masked_attention(q[:, :, rows], keys, values, part_mask, scale=scale))
    return torch.cat(outputs, dim=2)[..., :width]
