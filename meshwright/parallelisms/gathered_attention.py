"""Causal attention of a rank's two chunks of queries to gathered keys, without a mask.

For backward a rank keeps its own part of the keys and values, and gathers them once more.

A chunk sees all earlier chunks whole, and itself causally: two calls of a fused kernel, merged by
the logarithms of their sums of exponential scores. Source of the merge: Rabe and Staats 2021,
arXiv:2112.05682; of the backward from the merged logarithms: Dao 2023, arXiv:2307.08691.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallelisms.all_gather import all_gather, reduce_scatter
from meshwright.parallelisms.ring_attention import SEQUENCE, efficient_kernels, kernels

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
