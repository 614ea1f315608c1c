"""Linear attention by the gated delta rule: each head keeps a matrix instead of keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.delta import DeltaSpec
from meshwright.models.delta_rule import gated_delta_rule
from meshwright.models.layers import Linear, OfHeads, RMSNorm, add_layers


class DeltaCore(nn.Module):
    """The convolution, and the gated delta rule: where information passes from token to token.

    A module without parameters, named `attention.core`, so that context parallelism and generation
    have one thing to replace, which takes these arguments and gives this result.
    """

    def forward(
        self,
        rows: Tensor,
        taps: Tensor,
        decay: Tensor,
        strength: Tensor,
        documents: Tensor | None,
        *,
        value_dim: int,
        key_dim: int,
    ) -> Tensor:
        """(B, S, W) -> (B, S, H, V) fp32.

        Args:
            rows: queries of G heads, keys of G heads and values of H heads, one after the other.
            taps: (W, T) fp32, of the convolution of each.
            decay: (B, S, H) fp32, logarithms.
            strength: (B, S, H).
            documents: (B, S) int, as `Decoder` takes them; None: one for each sequence.
            value_dim, key_dim: V and K.
        """
        rows = convolve_all(rows, taps, documents)
        q, k, v = split_heads(rows, decay.shape[-1], key_dim, value_dim)
        return gated_delta_rule(q, k, v, decay, strength, documents)[0]


def convolve_all(rows: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
    """Return `convolve` of whole sequences, (B, S, W) -> (B, S, W) fp32."""
    behind = taps.shape[1] - 1
    of_padded = None if documents is None else F.pad(documents, (behind, 0))
    return convolve(F.pad(rows, (0, 0, behind, 0)), taps, of_padded)


def convolve(rows: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
    """Return silu of the causal convolution of each channel, within documents: (B, S, W) fp32.

    Args:
        rows: (B, T - 1 + S, W), of which T - 1 are of tokens before the first, or zeros.
        taps: (W, T) fp32; the last is of the token itself.
        documents: (B, T - 1 + S) int, of the same tokens; None: one for each sequence.
    """
    rows, behind = rows.float(), taps.shape[1] - 1
    length = rows.shape[1] - behind
    out = rows[:, behind:] * taps[:, behind]
    for place in range(behind):
        part = rows[:, place : place + length] * taps[:, place]
        if documents is not None:
            is_own = documents[:, place : place + length] == documents[:, behind:]
            part = part * is_own.unsqueeze(-1)
        out = out + part
    return F.silu(out)


def split_heads(
    rows: Tensor, n_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, W) -> (B, S, G, K) twice, (B, S, H, V), as `DeltaCore` takes them in one."""
    values = n_heads * value_dim
    keys = (rows.shape[-1] - values) // 2
    q, k, v = rows.split((keys, keys, values), -1)
    widths = (key_dim, key_dim, value_dim)
    q, k, v = (x.unflatten(-1, (-1, w)) for x, w in zip((q, k, v), widths, strict=True))
    return q, k, v


class DeltaNet(nn.Module):
    """Gated DeltaNet: the normalized output of the rule times silu of a gate.

    Source: Yang et al. 2024, arXiv:2412.06464, section 3.4.
    """

    in_q: Linear
    in_k: Linear
    in_v: Linear
    in_z: Linear
    in_b: Linear
    in_a: Linear
    conv_q: OfHeads
    conv_k: OfHeads
    conv_v: OfHeads
    a_log: OfHeads
    dt_bias: OfHeads
    norm: RMSNorm
    out: Linear

    def __init__(self, spec: DeltaSpec) -> None:
        super().__init__()
        self.widths = {"value_dim": spec.value_dim, "key_dim": spec.key_dim}
        self.value_dim, self.strength_scale = spec.value_dim, spec.strength_scale
        add_layers(self, spec.parameters, spec.norm_eps)
        self.core = DeltaCore()

    def forward(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, documents: Tensor | None = None
    ) -> Tensor:
        """(B, S, D) -> (B, S, D); the order of tokens is known without `cos` and `sin`.

        Args:
            documents: (B, S) int, as `Decoder` takes them.
        """
        rows = torch.cat([self.in_q(x), self.in_k(x), self.in_v(x)], -1)
        taps = torch.cat([self.conv_q(x), self.conv_k(x), self.conv_v(x)])
        # softplus, whose gradient the compiler expects in another layout than it has (torch 2.13)
        raw_step = self.in_a(x).float() + self.dt_bias(x)
        step = torch.logaddexp(raw_step, torch.zeros_like(raw_step))
        decay = -self.a_log(x).exp() * step  # (B, S, H)
        strength = self.in_b(x).sigmoid()
        if self.strength_scale != 1:
            strength = strength * self.strength_scale
        out = self.core(rows, taps, decay, strength, documents, **self.widths)
        gate = self.in_z(x).unflatten(-1, (-1, self.value_dim))
        out = self.norm(out.to(gate.dtype)).float() * F.silu(gate.float())
        return self.out(out.to(gate.dtype).flatten(-2))
