"""Causal attention on this CPU: SDPA against blocks of queries that meet only the keys they need.

SDPA's kernel skips keys in steps of 512. The alternative goes through the queries in blocks of 128
rows (more in long sequences, so that there are at most 16), each with the keys up to its last row,
and computes the weights again in backward; torch.compile fuses what lies between the products.
Forward and backward of one layer; medians, in turns; errors against fp64.

    python benchmarks/attention.py --batch 4 --seq-len 512
    python benchmarks/attention.py --batch 1 --seq-len 2048 --dtype float32
"""

import argparse
import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS, MOST_BLOCKS = 128, 16


def blocks(seq_len: int) -> Iterator[tuple[int, int]]:
    """First row, and the one after the last, of each block."""
    rows = LEAST_ROWS
    while seq_len > rows * MOST_BLOCKS:
        rows *= 2
    for first in range(0, seq_len, rows):
        yield first, min(first + rows, seq_len)


def scores(q: Tensor, k: Tensor, first: int, end: int) -> Tensor:
    """(B, K, G, rows, H), (B, K, S, H) -> (B, K, G, rows, end) fp32, -inf where not seen."""
    products = (q.flatten(2, 3) @ k[:, :, :end].mT).float() / math.sqrt(q.shape[-1])
    row = torch.arange(first, end)[:, None]
    return torch.where(row >= torch.arange(end), products.unflatten(2, q.shape[2:4]), -math.inf)


class BlockAttention(torch.autograd.Function):
    """(B, K, G, S, H), (B, K, S, H) twice -> (B, K, G, S, H)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, sums = [], []
        for first, end in blocks(q.shape[3]):
            part = scores(q[:, :, :, first:end], k, first, end)
            top = part.amax(-1, keepdim=True)
            weights = (part - top).exp()
            total = weights.sum(-1, keepdim=True)
            out = (weights.to(q.dtype).flatten(2, 3) @ v[:, :, :end]).unflatten(2, part.shape[2:4])
            outputs.append((out.float() / total).to(q.dtype))
            sums.append(top + total.log())
        output, logsumexp = torch.cat(outputs, 3), torch.cat(sums, 3)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        shift = (grad.float() * output.float()).sum(-1, keepdim=True)
        of_q, of_k, of_v = [], torch.zeros_like(k).float(), torch.zeros_like(v).float()
        for first, end in blocks(q.shape[3]):
            rows = (slice(None),) * 3 + (slice(first, end),)
            weights = (scores(q[rows], k, first, end) - logsumexp[rows]).exp()
            to_out = grad[rows].flatten(2, 3)
            of_weights = (to_out @ v[:, :, :end].mT).float().unflatten(2, weights.shape[2:4])
            of_scores = (weights * (of_weights - shift[rows])).to(q.dtype).flatten(2, 3)
            of_scores = of_scores / math.sqrt(q.shape[-1])
            of_q.append((of_scores @ k[:, :, :end]).unflatten(2, weights.shape[2:4]))
            of_k[:, :, :end] += of_scores.mT @ q[rows].flatten(2, 3)
            of_v[:, :, :end] += weights.to(q.dtype).flatten(2, 3).mT @ to_out
        return torch.cat(of_q, 3), of_k.to(k.dtype), of_v.to(v.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the model calls it."""
    heads = q.flatten(1, 2)
    return F.scaled_dot_product_attention(heads, k, v, is_causal=True, enable_gqa=True)


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, by blocks."""
    return BlockAttention.apply(q, k, v).flatten(1, 2)


def main() -> None:
    """Print the median of each, and its error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("batch", 4), ("heads", 8), ("kv-heads", 4), ("seq-len", 512)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (args.batch, args.kv_heads, args.seq_len, args.head_dim)
    grouped = (*shape[:2], args.heads // args.kv_heads, *shape[2:])
    q, k, v = (
        torch.randn(s).to(getattr(torch, args.dtype)).requires_grad_()
        for s in (grouped, shape, shape)
    )
    want = sdpa(q.double(), k.double(), v.double()).detach()
    grad = torch.randn_like(sdpa(q, k, v))
    start = time.perf_counter()
    compiled = torch.compile(in_blocks)
    compiled(q, k, v).backward(grad)
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    ways = {"sdpa": sdpa, "blocks, compiled": compiled}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way(q, k, v).backward(grad)
            taken[name].append(1e3 * (time.perf_counter() - start))
    for name, way in ways.items():
        error = (way(q, k, v).detach().double() - want).abs().max()
        low, middle, high = min(taken[name]), median(taken[name]), max(taken[name])
        print(f"{name:18} {middle:7.1f} ms ({low:.1f} to {high:.1f}), error {error:.1e}")


if __name__ == "__main__":
    main()
