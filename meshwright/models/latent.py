"""Latent attention as data, and the dimensions of models that have it. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from meshwright.models.args import DecoderArgs
from meshwright.models.checks import check_positive
from meshwright.models.parameter import Parameter
from meshwright.models.rope_scaling import Yarn
from meshwright.models.table import AttentionSpec, Module


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """Attention of N heads whose keys and values are products of one narrow vector of a token, its
    latent. The last elements of a query or key are rotated; the rotated part of a key is the same
    for all heads.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 (MLA). Names are DeepSeek's.
    """

    module: ClassVar[Module] = "meshwright.models.latent_attention:LatentAttention"

    q_rank: int
    """Width of the latent of queries; 0: they come from the layer's input."""
    kv_rank: int
    """Width of the latent of keys and values."""
    v_dim: int
    """Width of a head's values, at most H."""

    @property
    def value_dim(self) -> int:
        return self.v_dim

    @property
    def rotated_dim(self) -> int:
        """Elements of a query or key that are rotated."""
        assert self.rope is not None
        return self.rope.head_dim

    @property
    def bare_modules(self) -> tuple[str, ...]:
        return ("narrow", "seen", "core")

    @property
    def logit_rows(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """As the base's. The rotated part of a key is that of all heads, so it stays, and the
        rotated part of the query takes the whole factor (arXiv:2507.20534, section 2.1)."""
        plain = self.head_dim - self.rotated_dim
        query = "wq_b.weight" if self.q_rank else "wq.weight"
        return {
            query: ((plain, 0.5), (self.rotated_dim, 1.0)),
            "wkv_b.weight": ((plain, 0.5), (self.v_dim, 0.0)),
        }

    @property
    def parameters(self) -> dict[str, Parameter]:
        parts = ("n_heads", self.n_heads)

        def matrix(rows: int, columns: int, *, of_heads: bool) -> Parameter:
            layout, own = ("colwise_gathered", parts) if of_heads else ("on_tokens", None)
            heads = self.n_heads if of_heads else 1
            return Parameter((rows, columns), layout, self.std, parts=own, heads=heads)  # type: ignore[arg-type]  # one of two

        def norm(width: int) -> Parameter:
            return Parameter((width,), "on_tokens", None, 0)

        query, plain = self.n_heads * self.head_dim, self.head_dim - self.rotated_dim
        if self.q_rank:
            found = {
                "wq_a.weight": matrix(self.q_rank, self.dim, of_heads=False),
                "q_norm.weight": norm(self.q_rank),
                "wq_b.weight": matrix(query, self.q_rank, of_heads=True),
            }
        else:
            found = {"wq.weight": matrix(query, self.dim, of_heads=True)}
        narrow, wide = self.kv_rank + self.rotated_dim, self.n_heads * (plain + self.v_dim)
        out = (self.dim, self.n_heads * self.v_dim)
        return found | {
            "wkv_a.weight": matrix(narrow, self.dim, of_heads=False),
            "kv_norm.weight": norm(self.kv_rank),
            "wkv_b.weight": matrix(wide, self.kv_rank, of_heads=True),
            "wo.weight": Parameter(out, "rowwise", self.out_std, parts=parts),
        }


@dataclass(frozen=True)
class LatentArgs(DecoderArgs):
    """The dimensions of a decoder with latent attention. `n_kv_heads` is `n_heads`, and `head_dim`
    follows from the two widths of a query."""

    q_lora_rank: int = 0
    """Width of the latent of queries; 0: they come from the layer's input."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Elements of a query or key that aren't rotated."""
    qk_rope_head_dim: int = 64
    """Elements of a query or key that are rotated."""
    v_head_dim: int = 128
    """Elements of a value."""
    rope_scaling: Yarn | None = None

    def check_heads(self) -> None:
        check_positive(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads = {self.n_kv_heads}: latent attention has a key and a value for each "
                f"head, so it must be n_heads: use {self.n_heads}"
            )
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim is not None:
            raise ValueError(
                f"head_dim = {self.head_dim}: heads of latent attention are qk_nope_head_dim + "
                f"qk_rope_head_dim = {width} wide: leave it out"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim = {self.qk_rope_head_dim}: must be even, to be rotated in pairs"
            )
        if self.v_head_dim > width:
            raise ValueError(
                f"v_head_dim = {self.v_head_dim}: must be at most qk_nope_head_dim + "
                f"qk_rope_head_dim: use {width}"
            )
        if self.q_lora_rank < 0:
            raise ValueError(f"q_lora_rank = {self.q_lora_rank}: must be 0 or positive: use 0")

    @property
    def resolved(self) -> Self:
        return self

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        """Return latent attention in every layer."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        factor = self.rope_scaling.score_factor if self.rope_scaling else 1.0
        assert attention.rope is not None
        latent = LatentSpec(
            dim=self.dim,
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            head_dim=width,
            qk_norm=None,
            norm_eps=attention.norm_eps,
            std=attention.std,
            out_std=attention.out_std,
            rope=replace(attention.rope, head_dim=self.qk_rope_head_dim),
            scale=factor / math.sqrt(width),
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            v_dim=self.v_head_dim,
        )
        return [latent] * self.n_layers

    def of_width(self, dim: int) -> dict[str, int]:
        ranks = {"kv_lora_rank": self.scaled(self.kv_lora_rank, dim)}
        if self.q_lora_rank:
            ranks["q_lora_rank"] = self.scaled(self.q_lora_rank, dim)
        return super().of_width(dim) | ranks

    def small(self) -> dict[str, Any]:
        latents = {"q_lora_rank": min(self.q_lora_rank, 18), "kv_lora_rank": 10}
        widths = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None}
        return super().small() | latents | widths
