"""Rotary position embedding, in real numbers: torch.compile generates no code for complex."""

import math

import torch
from torch import Tensor


def rope_cache(
    seq_len: int,
    head_dim: int,
    theta: float,
    device: torch.device | None = None,
    *,
    scaling: tuple[float, float, float, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, with frequency_i = theta^(-2i / H).

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; long wavelengths are stretched
    as in Grattafiori et al. 2024, arXiv:2407.21783, and Meta's published code: frequencies
    whose wavelength exceeds original / low are divided by `factor`, those below original / high
    are kept, and in between the two are mixed linearly in original / wavelength.

    Args:
        seq_len: positions 0 .. seq_len - 1.
        head_dim: H, even.
        scaling: (factor, low, high, original), as in `RopeScaling`.

    Returns:
        cos and sin, each (seq_len, H/2) fp32.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / theta**exponent  # (H/2,)
    if scaling is not None:
        factor, low, high, original = scaling
        periods = original * frequency / (2 * math.pi)  # turns within the original context
        kept = ((periods - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    position = torch.arange(seq_len, dtype=torch.float32, device=device)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, S, N, H) -> (B, S, N, H)
    """Rotate each pair (x[2i], x[2i+1]) by its angle, in fp32; pairs lie as in Meta's weights.

    Args:
        cos, sin: (S, H/2) or (B, S, H/2) fp32.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)  # (B, S, N, H/2) each
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)
