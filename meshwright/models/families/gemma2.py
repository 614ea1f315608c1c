"""Gemma 2 as data. Free of torch.

Source: Gemma Team 2024, arXiv:2408.00118; dimensions come from the config.json of
google/gemma-2-2b to google/gemma-2-27b.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.args import STD, WindowArgs
from meshwright.models.checks import check_positive
from meshwright.models.config_json import Windows
from meshwright.models.family import MODULES, Family, HuggingFaceForm
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class GemmaArgs(WindowArgs):
    """Dimensions that Gemma 2 and 3 share."""

    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    query_scale: int = 256
    """Products of queries and keys are divided by its square root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_scale")

    def gemma(self, **options: Any) -> DecoderSpec:
        """Return a model with norms before and after, whose weights are offsets from one, and
        embeddings times sqrt(D). The reports give no initial values: logits have variance 1.

        Args:
            options: as `decoder` takes them.
        """
        return self.decoder(
            norm="sandwich",
            has_norm_offset=True,
            activation="gelu",
            embedding_scale=math.sqrt(self.dim),
            out_std=STD / math.sqrt(2 * self.n_layers),
            output_std=1 / math.sqrt(self.dim),
            **options,
        )

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        return super().attention_layers(replace(attention, scale=self.query_scale**-0.5))

    def small(self) -> dict[str, Any]:
        return super().small() | {"query_scale": 5}


@dataclass(frozen=True)
class Gemma2Args(GemmaArgs):
    """Dimensions of a Gemma 2."""

    rope_theta: float = 10000.0
    full_every: int = 2
    attention_cap: float | None = 50.0
    """c: scores s become c tanh(s / c); None: they stay."""
    output_cap: float | None = 30.0
    """The same of logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        caps = ("attention_cap", "output_cap")
        check_positive(self, *(name for name in caps if getattr(self, name) is not None))

    def expand(self) -> DecoderSpec:
        """Every second layer is full; scores and logits are capped."""
        return self.gemma(output_cap=self.output_cap)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        return super().attention_layers(replace(attention, soft_cap=self.attention_cap))

    def small(self) -> dict[str, Any]:
        return super().small() | {"attention_cap": 2.0, "output_cap": 3.0}


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

FLAVORS: dict[str, Gemma2Args] = {
    "debugmodel": Gemma2Args(256, 6, 8, 4, 768, 2048, window=64),
    "gemma2_2b": Gemma2Args(2304, 26, 8, 4, 9216, 256000, head_dim=256),
    "gemma2_9b": Gemma2Args(3584, 42, 16, 8, 14336, 256000, head_dim=256),
    "gemma2_27b": Gemma2Args(4608, 46, 32, 16, 36864, 256000, head_dim=128, query_scale=144),
}

FAMILY = Family(
    name="gemma2",
    args=Gemma2Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        modules=NAMES,
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": None,
        },
        defaults={**DEFAULTS, "vocab_size": 256000},
        integers={"query_scale": "query_pre_attn_scalar"},
        caps={
            "attention_cap": ("attn_logit_softcapping", 50.0),
            "output_cap": ("final_logit_softcapping", 30.0),
        },
        windows=Windows(4096, every=2),
    ),
)
