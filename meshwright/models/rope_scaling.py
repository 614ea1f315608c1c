"""The ways to stretch long rotary wavelengths, so that a model takes longer contexts than it was
trained with. Free of torch; `attention.rope_cache` has the formulas."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from meshwright.models.checks import check_positive


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's: only wavelengths that are long compared to the original context are stretched.

    Source: Llama Team 2024, arXiv:2407.21783, and Meta's published code.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # when read from a TOML

    factor: float = 8.0
    """How many times longer a context than in the original training."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_seq_len / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_seq_len / high_freq_factor are left unchanged."""
    original_seq_len: int = 8192
    """Tokens of context in the original training."""

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = "
                f"{self.low_freq_factor}"
            )


@dataclass(frozen=True)
class LinearScaling:
    """Every wavelength is stretched by the same factor.

    Source: Chen et al. 2023, arXiv:2306.15595 (position interpolation).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    factor: float = 8.0
    """How many times longer a context than in the original training."""

    def __post_init__(self) -> None:
        check_positive(self, "factor")


@dataclass(frozen=True)
class Yarn:
    """YaRN: wavelengths that make few turns within the original context are stretched, and queries
    and keys grow, so that attention stays as sharp.

    Source: Peng et al. 2023, arXiv:2309.00071.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    factor: float = 8.0
    """How many times longer a context than in the original training."""
    original_seq_len: int = 8192
    """Tokens of context in the original training."""
    beta_fast: float = 32.0
    """Wavelengths with more turns than this within the original context are left unchanged."""
    beta_slow: float = 1.0
    """Wavelengths with fewer turns than this are stretched by the whole factor."""
    attention_factor: float | None = None
    """Factor on rotated queries and keys; None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """The two bounds are rounded to whole pairs of a head."""
    mscale: float | None = None
    """With `mscale_all_dim`, attention_factor is m(mscale) / m(mscale_all_dim) if it isn't given,
    where m(x) = 0.1 x ln(factor) + 1."""
    mscale_all_dim: float | None = None
    """Models with latent attention multiply products of queries with keys by the square of
    m(mscale_all_dim)."""

    def __post_init__(self) -> None:
        check_positive(self, "factor", "original_seq_len", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            check_positive(self, "attention_factor")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast = {self.beta_fast}: must be at least beta_slow = {self.beta_slow}"
            )

    @property
    def amplitude(self) -> float:
        """The factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """The factor on products of queries with keys in latent attention.

        Source: DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.4, and its published code.
        """
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


Stretching = RopeScaling | LinearScaling | Yarn
"""Of `rope_scaling`; each family takes one of them."""
