"""Latent attention: keys and values of all heads are products of one narrow vector of a token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.attention import CausalAttention, Mask, apply_rope
from meshwright.models.latent import LatentSpec
from meshwright.models.layers import Linear, RMSNorm, add_layers

EPS = 1e-6
"""Of the norms of latents, which don't take the model's (DeepSeek's modeling_deepseek.py, and
transformers)."""


class LatentAttention(nn.Module):
    """Causal attention of N heads, where other tokens need only the latent and the rotated key of a
    token.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1. Names are DeepSeek's.

    Attributes:
        narrow: identity of (B, S, W), the vectors from which a token's heads are computed.
            Tensor parallelism, whose ranks have parts of the sequence before it, gathers them here.
        seen: identity of (B, S, kv_rank + rotated_dim), the latents and rotated keys that tokens
            see. Context parallelism gathers them from other ranks here; generation puts earlier
            tokens' before them.
    """

    wq: Linear
    wq_a: Linear
    q_norm: RMSNorm
    wq_b: Linear
    wkv_a: Linear
    kv_norm: RMSNorm
    wkv_b: Linear
    wo: Linear

    def __init__(self, spec: LatentSpec) -> None:
        super().__init__()
        self.q_rank, self.head_dim, self.v_dim = spec.q_rank, spec.head_dim, spec.v_dim
        self.kv_widths = (spec.kv_rank, spec.rotated_dim)
        self.widths = (spec.q_rank or spec.dim, *self.kv_widths)
        self.plain_dim = spec.head_dim - spec.rotated_dim
        self.scale = 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale
        add_layers(self, spec.parameters, EPS)
        self.narrow, self.seen, self.core = nn.Identity(), nn.Identity(), CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D); `cos` and `sin` are (S, rotated_dim / 2)."""
        tokens = x.flatten(0, 1)
        of_query = self.q_norm(self.wq_a(tokens)) if self.q_rank else tokens
        latent, key = self.wkv_a(tokens).split(self.kv_widths, -1)
        narrow = torch.cat([of_query, self.kv_norm(latent), key], -1)
        narrow = self.narrow(narrow.unflatten(0, x.shape[:2]))
        of_query, latent, key = narrow.split(self.widths, -1)
        key = apply_rope(key.unsqueeze(-2), cos, sin).squeeze(-2)
        latent, key = self.seen(torch.cat([latent, key], -1)).split(self.kv_widths, -1)

        q = self.wq_b(of_query) if self.q_rank else self.wq(of_query)
        q = q.unflatten(-1, (-1, self.head_dim))  # (B, S, N, H)
        q_plain, q_rotated = q[..., : self.plain_dim], q[..., self.plain_dim :]
        q = torch.cat([q_plain, apply_rope(q_rotated, cos, sin)], -1)
        kv = self.wkv_b(latent).unflatten(-1, (-1, self.plain_dim + self.v_dim))
        k_plain, v = kv.split((self.plain_dim, self.v_dim), -1)
        k = torch.cat([k_plain, key.unsqueeze(-2).expand(*k_plain.shape[:-1], -1)], -1)
        # fused kernels take values as wide as keys; columns of zeros change no other column
        v = F.pad(v, (0, self.head_dim - self.v_dim))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, N, S, H)
        out = self.core(q, k, v, mask, scale=self.scale, window=None, soft_cap=None)
        return self.wo(out[..., : self.v_dim].transpose(1, 2).flatten(-2))
