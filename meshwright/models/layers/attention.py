"""Causal self-attention with grouped key and value heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.layers.document_mask import Mask, masked_attention
from meshwright.models.layers.rope import apply_rope
from meshwright.models.table import AttentionSpec


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
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.head_dim, self.qk_norm = spec.head_dim, spec.qk_norm
        query, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        self.wq = nn.Linear(spec.dim, query, bias=False)
        self.wk = nn.Linear(spec.dim, kv, bias=False)
        self.wv = nn.Linear(spec.dim, kv, bias=False)
        self.wo = nn.Linear(query, spec.dim, bias=False)
        if spec.qk_norm is not None:
            is_whole = spec.qk_norm == "all"
            self.q_norm = nn.RMSNorm(query if is_whole else spec.head_dim, eps=spec.norm_eps)
            self.k_norm = nn.RMSNorm(kv if is_whole else spec.head_dim, eps=spec.norm_eps)
        self.core = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        # the number of heads is what the weights give, so that each rank may hold some of them
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)  # (B, S, N or K, H)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, N or K, S, H)
        out = self.core(q, k, v, mask)  # (B, N, S, H)
        return self.wo(out.transpose(1, 2).flatten(-2))
