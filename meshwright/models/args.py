"""A model's dimensions as users write them in `model.args`, and as a table. Free of torch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from meshwright.models.checks import check_positive, check_window
from meshwright.models.rope_scaling import Stretching
from meshwright.models.table import (
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MixtureSpec,
    NormSpec,
    PredictorSpec,
    RopeSpec,
)


def divisors_of(number: int) -> str:
    """Return the divisors of a positive number as a choice: "1, 2, 4 or 8"."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    *first, last = map(str, sorted({*small, *(number // n for n in small)}))
    return f"{', '.join(first)} or {last}" if first else last


MOST_LAYERS = 10_000
"""Above this their number is a slip of the finger: each has its place in the table."""

MOST_PREDICTORS = 16
"""Each is as large as a layer, and its targets are as far away as its number."""

MOST_EXPERTS = 2**16
"""Of a layer: the number of each fits in 16 bits of the key by which they are sorted."""

STD = 0.02
"""Of the initial values of most matrices."""

DEBUG_SIZE = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden_dim": 768,
    "vocab_size": 2048,
}
"""Of most families' debug model."""


@dataclass(frozen=True)
class DecoderArgs(ABC):
    """The dimensions of a decoder; a family is a subclass that expands them to a table.

    Raises:
        ValueError: if the dimensions don't fit each other.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # when read from a TOML

    dim: int
    """Model width D."""
    n_layers: int
    n_heads: int
    """Query heads N."""
    n_kv_heads: int
    """Key and value heads K; each serves N/K query heads."""
    hidden_dim: int
    """FFN hidden size F of the feed-forward block."""
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_embeddings: bool = False
    """The output projection is the embedding."""
    head_dim: int | None = None
    """Width H of a head; None: dim / n_heads."""
    mtp_depth: int = 0
    """Layers of multi-token prediction (MTP): the first predicts the token after the next, and each
    that follows a token one place further. Only training has them."""

    def __post_init__(self) -> None:
        check_positive(self, "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
        check_positive(self, "vocab_size", "norm_eps", "rope_theta")
        if self.n_layers > MOST_LAYERS:
            raise ValueError(f"n_layers = {self.n_layers}: must be at most {MOST_LAYERS}")
        if not 0 <= self.mtp_depth <= MOST_PREDICTORS:
            rule = f"must be at least 0 and at most {MOST_PREDICTORS}"
            raise ValueError(f"mtp_depth = {self.mtp_depth}: {rule}: use 1, as DeepSeek-V3 has")
        self.check_heads()

    def check_heads(self) -> None:
        """Check the number of heads and their width.

        Raises:
            ValueError: if they don't fit each other.
        """
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {self.n_heads}: "
                f"use {divisors_of(self.n_heads)}"
            )
        if self.head_dim is None:
            if self.dim % (2 * self.n_heads):
                raise ValueError(
                    f"dim = {self.dim}: must be a multiple of 2 * n_heads = {2 * self.n_heads}, "
                    "for heads of equal and even width"
                )
            return
        check_positive(self, "head_dim")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even, to be rotated in pairs")

    @abstractmethod
    def expand(self) -> DecoderSpec:
        """Return the model that these dimensions are of."""

    @cached_property
    def table(self) -> DecoderSpec:
        """The same, made once."""
        return self.expand()

    @property
    def resolved(self) -> Self:
        """The same model, with every field filled in."""
        return replace(self, head_dim=self.head_dim or self.dim // self.n_heads)

    @property
    def folded_factors(self) -> dict[str, float]:
        """Factors by name of a parameter that the model multiplies by and others don't: with them
        in its weights, it is the same function to others."""
        return {}

    def expert_layers(self, out_std: float) -> Sequence[MixtureSpec | None]:
        """Return the experts of each layer, in the place of its feed-forward; None: it keeps that.

        Args:
            out_std: as in `decoder`.
        """
        return [None] * self.n_layers

    def attention_layers(self, attention: AttentionSpec) -> Sequence[MixerSpec]:
        """Return the attention of each layer.

        Args:
            attention: of layers that see all tokens before, as `decoder` makes it.
        """
        return [attention] * self.n_layers

    def feed_forward_layers(self, feed_forward: FeedForwardSpec) -> Sequence[FeedForwardSpec]:
        """Return the feed-forward of each layer, if that has no experts.

        Args:
            feed_forward: as `decoder` makes it.
        """
        return [feed_forward] * self.n_layers

    def small(self) -> dict[str, Any]:
        """Return dimensions of the family's own of a model with few of everything, by name."""
        return {}

    def of_width(self, dim: int) -> dict[str, int]:
        """Return the dimensions of a model of this shape and a different width, by name: depth and
        FFN hidden size keep their ratio to the width, heads keep their width. A family that has
        more dimensions that follow the width adds them.

        Raises:
            ValueError: if the width isn't a whole number of heads.
        """
        heads, rest = divmod(dim * self.n_heads, self.dim)
        if rest:
            unit = self.dim // math.gcd(self.dim, self.n_heads)
            rule = f"must be a multiple of {unit}, for heads of the same width"
            raise ValueError(f"dim = {dim}: {rule}: use {max(round(dim / unit), 1) * unit}")
        groups = (n for n in range(1, heads + 1) if heads % n == 0)
        kv_heads = [n for n in groups if n * self.n_heads <= heads * self.n_kv_heads]
        return {
            "dim": dim,
            "n_heads": heads,
            "n_kv_heads": max(kv_heads, default=1),
            "n_layers": self.scaled(self.n_layers, dim),
            "hidden_dim": self.scaled(self.hidden_dim, dim),
        }

    def scaled(self, size: int, dim: int) -> int:
        """Return a size that has the same ratio to a different width, to the next whole number."""
        return max(round(size * dim / self.dim), 1)

    def with_unit_logits(self, **options: Any) -> DecoderSpec:
        """Return a model that starts with logits of variance 1 at any width. Matrices that end on
        the residual stream start smaller the more layers there are, so that its variance doesn't
        grow with depth (Radford et al. 2019, GPT-2, section 2.3).

        Args:
            options: as `decoder` takes them.
        """
        out_std = STD / math.sqrt(2 * self.n_layers)
        return self.decoder(out_std=out_std, output_std=1 / math.sqrt(self.dim), **options)

    def decoder(
        self,
        *,
        norm: Literal["pre", "post", "sandwich"] = "pre",
        has_norm_offset: bool = False,
        qk_norm: Literal["head", "all"] | None = None,
        out_std: float = STD,
        output_std: float = STD,
        rope_scaling: Stretching | None = None,
        activation: Literal["silu", "gelu"] = "silu",
        residual_scale: float = 1.0,
        norms: type[NormSpec] = NormSpec,
        **options: Any,
    ) -> DecoderSpec:
        """Return a model of `n_layers` layers, with `attention_layers`, `feed_forward_layers` and
        `expert_layers`, and `mtp_depth` more like the last one, for `expand`.

        Args:
            norm, has_norm_offset, qk_norm, activation, residual_scale, norms: as in `LayerSpec`,
                `AttentionSpec` and `FeedForwardSpec`.
            out_std: of the initial values of matrices that end on the residual stream.
            output_std: as in `DecoderSpec`.
            options: further fields of `DecoderSpec`.
        """
        head_dim = self.head_dim or self.dim // self.n_heads
        attention = AttentionSpec(
            dim=self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            norm_eps=self.norm_eps,
            std=STD,
            out_std=out_std,
            rope=RopeSpec(head_dim, self.rope_theta, rope_scaling),
            has_norm_offset=has_norm_offset,
        )
        feed_forward = FeedForwardSpec(
            self.dim, self.hidden_dim, std=STD, out_std=out_std, activation=activation
        )
        parts: dict[str, Sequence[Any]] = {
            "attention_layers": self.attention_layers(attention),
            "feed_forward_layers": self.feed_forward_layers(feed_forward),
            "expert_layers": self.expert_layers(out_std),
        }
        for name, found in parts.items():
            if not isinstance(found, Sequence) or len(found) != self.n_layers:
                size = len(found) if isinstance(found, Sequence) else repr(found)
                raise ValueError(f"{name} returns {size} specs, and n_layers = {self.n_layers}")
        layers = [
            LayerSpec(
                own,
                mixture or dense,
                norm,
                self.norm_eps,
                has_norm_offset,
                residual_scale,
                norms,
            )
            for own, dense, mixture in zip(*parts.values(), strict=True)
        ]
        predictor = PredictorSpec(**vars(layers[-1]))
        return DecoderSpec(
            dim=self.dim,
            vocab_size=self.vocab_size,
            layers=(*layers, *[predictor] * self.mtp_depth),
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
            std=STD,
            output_std=output_std,
            has_norm_offset=has_norm_offset,
            norms=norms,
            **options,
        )


@dataclass(frozen=True)
class FullEveryArgs(DecoderArgs):
    """The dimensions of a decoder most of whose layers have a cheaper attention."""

    full_every: int = 4
    """Every layer of this number, counted from 1, has softmax attention to all tokens before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "full_every")

    def is_full(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, sees all tokens before."""
        return (layer + 1) % self.full_every == 0

    @property
    def resolved(self) -> Self:
        return replace(super().resolved, full_every=min(self.full_every, self.n_layers + 1))


@dataclass(frozen=True)
class WindowArgs(FullEveryArgs):
    """The dimensions of a decoder most of whose layers see only the last tokens."""

    window: int = 4096
    """Tokens W that a token of these layers sees, with itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self.window)

    def windowed(self, attention: AttentionSpec) -> AttentionSpec:
        """Return the attention of layers with a window, from that of full ones."""
        return replace(attention, window=self.window)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        """Return full layers at every `full_every`-th place, and layers with a window between."""
        windowed = self.windowed(attention)
        return [attention if self.is_full(layer) else windowed for layer in range(self.n_layers)]

    def small(self) -> dict[str, Any]:
        return super().small() | {"window": 7, "full_every": min(self.full_every, 2)}


@dataclass(frozen=True)
class ExpertArgs(DecoderArgs):
    """The dimensions of a decoder whose layers have experts, each of MLP width `hidden_dim`."""

    n_experts: int = 8
    """Experts E of a layer."""
    n_active: int = 2
    """Experts K that each token goes through."""
    normalize_experts: bool = True
    """The weights of a token's experts are divided by their sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_experts", "n_active")
        if self.n_experts > MOST_EXPERTS:
            raise ValueError(f"n_experts = {self.n_experts}: must be at most {MOST_EXPERTS}")
        if self.n_active > self.n_experts:
            raise ValueError(
                f"n_active = {self.n_active}: must be at most n_experts = {self.n_experts}: "
                f"use {self.n_experts}"
            )
        if self.n_active == 1 and self.normalize_experts:
            raise ValueError(
                "n_active = 1: with normalize_experts its weight is always 1, so the router does "
                "not learn: use 2, or set normalize_experts = false"
            )

    def small(self) -> dict[str, Any]:
        return {"n_experts": 8, "n_active": min(self.n_active, 3)}

    def expert_layers(self, out_std: float) -> Sequence[MixtureSpec | None]:
        return [self.mixture(self.hidden_dim, out_std)] * self.n_layers

    def mixture(self, hidden_dim: int, out_std: float, **options: Any) -> MixtureSpec:
        """Return the experts of a layer, each of FFN hidden size `hidden_dim`.

        Args:
            options: further fields of `MixtureSpec`.
        """
        return MixtureSpec(
            dim=self.dim,
            hidden_dim=hidden_dim,
            n_experts=self.n_experts,
            n_active=self.n_active,
            normalizes=self.normalize_experts,
            std=STD,
            out_std=out_std,
            **options,
        )


@dataclass(frozen=True)
class DenseFirstArgs(ExpertArgs):
    """The dimensions of a decoder whose experts have their own width, and whose first layers have
    none."""

    expert_dim: int = 768
    """FFN hidden size F of an expert."""
    n_dense_layers: int = 0
    """First layers that have one feed-forward of `hidden_dim` instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "expert_dim")
        if not 0 <= self.n_dense_layers < self.n_layers:
            raise ValueError(
                f"n_dense_layers = {self.n_dense_layers}: must be at least 0 and below n_layers = "
                f"{self.n_layers}: use {self.n_layers - 1}"
            )

    def expert_layers(self, out_std: float) -> Sequence[MixtureSpec | None]:
        mixture, dense = self.mixture(self.expert_dim, out_std), self.n_dense_layers
        return [*[None] * dense, *[mixture] * (self.n_layers - dense)]

    def of_width(self, dim: int) -> dict[str, int]:
        found = super().of_width(dim)
        dense = min(self.n_dense_layers, found["n_layers"] - 1)
        return found | {"expert_dim": self.scaled(self.expert_dim, dim), "n_dense_layers": dense}

    def small(self) -> dict[str, Any]:
        return super().small() | {"expert_dim": 24, "n_dense_layers": min(self.n_dense_layers, 1)}
