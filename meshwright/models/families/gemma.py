"""Dimensions, names and values of absent keys that Gemma 2 and 3 share. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.args import WindowArgs
from meshwright.models.checks import check_positive
from meshwright.models.family import MODULES
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class GemmaArgs(WindowArgs):
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    query_scale: int = 256
    """Products of queries and keys are divided by its square root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_scale")

    def gemma(self, **options: Any) -> DecoderSpec:
        """Return a model with norms before and after, whose weights are offsets from one, and
        embeddings times sqrt(D). The reports give no initial values.

        Args:
            options: as `decoder` takes them.
        """
        return self.with_unit_logits(
            norm="sandwich",
            has_norm_offset=True,
            activation="gelu",
            embedding_scale=math.sqrt(self.dim),
            **options,
        )

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        return super().attention_layers(replace(attention, scale=self.query_scale**-0.5))

    def small(self) -> dict[str, Any]:
        return super().small() | {"query_scale": 5}


NAMES = {
    **MODULES,
    "layers.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.{}.post_ffn_norm": "model.layers.{}.post_feedforward_layernorm",
}

DEFAULTS: dict[str, object] = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""Values of absent keys in both classes of transformers. Published files of Gemma 3 have few."""
