"""Linear attention by the gated delta rule as data (Gated DeltaNet), and the dimensions of models
that have it. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from meshwright.models.args import DEBUG_SIZE, FullEveryArgs
from meshwright.models.checks import check_positive
from meshwright.models.parameter import Parameter
from meshwright.models.table import AttentionSpec, MixerSpec, Module, RopeSpec


def log_of_decay(share: float) -> float:
    """Return the logarithm of a rate that is uniform in (0, 16), as FLA and Mamba 2 start."""
    return math.log(16 * share)


def bias_of_step(share: float) -> float:
    """Return b whose softplus, the length of a step, is between 0.001 and 0.1, uniform in its
    logarithm, as FLA and Mamba 2 start. transformers has 1, with which states forget at once."""
    step = 0.001 * 100**share
    return step + math.log(-math.expm1(-step))


@dataclass(frozen=True)
class DeltaSpec(MixerSpec):
    """Linear attention of H heads of values, in groups that share one of G heads of queries and
    keys. A head has a state of K x V, whatever the length of the sequence.

    Source: Yang et al. 2024, arXiv:2412.06464. Names are FLA's and transformers'.
    """

    module: ClassVar[Module] = "meshwright.models.delta_net:DeltaNet"

    dim: int
    n_heads: int
    """H."""
    n_key_heads: int
    """G."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    num_taps: int
    """Tokens that the convolution of queries, keys and values sees, with the token itself."""
    norm_eps: float
    std: float
    out_std: float
    strength_scale: float = 1.0
    """Factor on the strength b, the sigmoid of a product. With 2, a state may change its sign along
    a key: the map I - b k k^T then has an eigenvalue down to -1 (Grazzi et al. 2024,
    arXiv:2411.12537)."""
    rope: RopeSpec | None = field(default=None, init=False)
    window: int | None = field(default=None, init=False)

    def num_flops(self, seq_len: int) -> int:
        """Of the recurrence: a token reads the state by its key and its query, and writes to it."""
        return 3 * 2 * self.n_heads * self.key_dim * self.value_dim * seq_len

    @property
    def parameters(self) -> dict[str, Parameter]:
        keys, values = self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        parts = ("linear_num_key_heads", self.n_key_heads)

        def of_heads(heads: int, width: int) -> Parameter:
            shape = heads * width, self.dim
            return Parameter(shape, "colwise", self.std, parts=parts, heads=heads)

        def numbers_of_heads() -> Parameter:
            return Parameter((self.n_heads, self.dim), "colwise", self.std, parts=parts)

        def filters(channels: int) -> Parameter:
            # the deviation that torch's convolutions start with
            std = 1 / math.sqrt(3 * self.num_taps)
            return Parameter((channels, self.num_taps), "heads", std, 0, parts)

        def numbers(quantile: Any) -> Parameter:
            return Parameter((self.n_heads,), "heads", None, 0, parts, quantile=quantile)

        return {
            "in_q.weight": of_heads(self.n_key_heads, self.key_dim),
            "in_k.weight": of_heads(self.n_key_heads, self.key_dim),
            "in_v.weight": of_heads(self.n_heads, self.value_dim),
            "in_z.weight": of_heads(self.n_heads, self.value_dim),
            "in_b.weight": numbers_of_heads(),
            "in_a.weight": numbers_of_heads(),
            "conv_q.weight": filters(keys),
            "conv_k.weight": filters(keys),
            "conv_v.weight": filters(values),
            "a_log.weight": numbers(log_of_decay),
            "dt_bias.weight": numbers(bias_of_step),
            "norm.weight": Parameter((self.value_dim,), "on_heads", None, 0),
            "out.weight": Parameter((self.dim, values), "rowwise", self.out_std, parts=parts),
        }


@dataclass(frozen=True)
class DeltaArgs(FullEveryArgs):
    """The dimensions of a decoder with linear attention in most layers."""

    linear_num_key_heads: int = 16
    """Heads G of queries and keys of linear attention."""
    linear_num_value_heads: int = 32
    """Heads H of values; each key head serves H/G of them."""
    linear_key_head_dim: int = 128
    """Width K of a head's queries and keys."""
    linear_value_head_dim: int = 128
    """Width V of a head's values."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the convolution sees, with the token itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "linear_num_key_heads", "linear_num_value_heads")
        check_positive(self, "linear_key_head_dim", "linear_value_head_dim")
        check_positive(self, "linear_conv_kernel_dim")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads = {self.linear_num_value_heads}: must be a multiple of "
                f"linear_num_key_heads = {self.linear_num_key_heads}: use "
                f"{self.linear_num_key_heads}"
            )
        if self.full_every > self.n_layers:
            raise ValueError(
                f"full_every = {self.full_every}: must be at most n_layers = {self.n_layers}, so "
                f"that a layer has softmax attention: use {self.n_layers}"
            )

    def softmax_attention(self, attention: AttentionSpec) -> AttentionSpec:
        """Return the attention of the layers that have no linear one, from `decoder`'s."""
        return attention

    def linear_attention(self, attention: AttentionSpec) -> DeltaSpec:
        """Return linear attention; its initial values are those of `attention`."""
        return DeltaSpec(
            dim=self.dim,
            n_heads=self.linear_num_value_heads,
            n_key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            num_taps=self.linear_conv_kernel_dim,
            norm_eps=attention.norm_eps,
            std=attention.std,
            out_std=attention.out_std,
        )

    def attention_layers(self, attention: AttentionSpec) -> Sequence[MixerSpec]:
        """Return softmax attention at every `full_every`-th place, and linear attention between."""
        full, linear = self.softmax_attention(attention), self.linear_attention(attention)
        return [full if self.is_full(layer) else linear for layer in range(self.n_layers)]

    def small(self) -> dict[str, Any]:
        heads = math.gcd(self.linear_num_key_heads, 8)
        shared = min(self.linear_num_value_heads // self.linear_num_key_heads, 2)
        # narrower heads may be all near zero after silu, and their norms would magnify rounding
        widths = {"linear_key_head_dim": 18, "linear_value_head_dim": 14}
        numbers = {"linear_num_key_heads": heads, "linear_num_value_heads": heads * shared}
        return super().small() | numbers | widths | {"full_every": 2}


@dataclass(frozen=True)
class GatedDeltaArgs(DeltaArgs):
    """The same, whose other layers have a gate, and rotate a part of each head."""

    partial_rotary_factor: float = 0.25
    """Share of a head of softmax attention that is rotated: its first elements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.partial_rotary_factor <= 1 or self.rotated_dim % 2:
            raise ValueError(
                f"partial_rotary_factor = {self.partial_rotary_factor}: must be in (0, 1], and "
                "rotate an even number of a head's elements: use 1.0"
            )

    @property
    def rotated_dim(self) -> int:
        """Elements of a head of softmax attention that are rotated."""
        return int((self.head_dim or self.dim // self.n_heads) * self.partial_rotary_factor)

    def softmax_attention(self, attention: AttentionSpec) -> AttentionSpec:
        rope = RopeSpec(self.rotated_dim, self.rope_theta)
        return replace(attention, rope=rope, is_gated=True)

    def small(self) -> dict[str, Any]:
        return super().small() | {"partial_rotary_factor": 0.667}  # 4 of 6 elements, or 6 of 10


DEBUG: dict[str, Any] = DEBUG_SIZE | {
    "full_every": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""What the debug models of all these families share."""
