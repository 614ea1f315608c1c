"""Causal self-attention with grouped key and value heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.layers.document_mask import Mask, masked_attention
from meshwright.models.layers.rope import apply_rope


class CausalAttention(nn.Module):
    """softmax(Q K^T / sqrt(H)) V, where a position sees itself and those before it.

    A module without parameters, so that parallelism has a name to replace it by.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, N, S, H) and twice (B, K, S, H) -> (B, N, S, H); K divides N.

        Args:
            mask: that of `build_mask`, which is causal too; None: only causal.
        """
        return causal_attention(q, k, v) if mask is None else masked_attention(q, k, v, mask)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as `CausalAttention` without a mask."""
    if q.is_cuda and q.dtype == torch.float32:
        # flash and cuDNN's kernels take 16 bits; the memory-efficient one has no grouped heads
        # (torch 2.13), and without it SDPA makes an S x S matrix
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)


def repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, K, S, H) -> (B, N, S, H): each key or value head as often as query heads use it."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


class Attention(nn.Module):
    """Causal attention of N query heads over K key/value heads, with rotary positions, no biases.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries). Names follow Llama checkpoints.

    Args:
        dim: model width D.
        n_heads: N.
        n_kv_heads: K, a divisor of N.
    """

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        # the number of heads is what the weights give, so that each rank may hold some of them
        q = apply_rope(self.wq(x).unflatten(-1, (-1, self.head_dim)), cos, sin)  # (B, S, N, H)
        k = apply_rope(self.wk(x).unflatten(-1, (-1, self.head_dim)), cos, sin)  # (B, S, K, H)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, N or K, S, H)
        out = self.core(q, k, v, mask)  # (B, N, S, H)
        return self.wo(out.transpose(1, 2).flatten(-2))
