"""Granite 3 as data. Free of torch.

Source: IBM 2024 (Granite 3.0 Language Models); dimensions come from the config.json of
ibm-granite/granite-3.1-2b-base and ibm-granite/granite-3.1-8b-base.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.args import DecoderArgs
from meshwright.models.checks import check_positive
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class MultiplierArgs(DecoderArgs):
    """Dimensions of a decoder with the factors of muP (Yang et al. 2022, arXiv:2203.03466)."""

    embedding_multiplier: float = 12.0
    """Of the embedding's vectors."""
    attention_multiplier: float = 0.015625
    """Of products of queries and keys."""
    residual_multiplier: float = 0.22
    """Of the results of attention and feed-forward, where they are added."""
    logits_scaling: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "embedding_multiplier", "attention_multiplier")
        check_positive(self, "residual_multiplier", "logits_scaling")

    def multiplied(self, output_scale: float, **options: Any) -> DecoderSpec:
        """Return the model. Logits have variance 1 at first.

        Args:
            options: as `decoder` takes them.
        """
        return self.decoder(
            output_std=1 / (output_scale * self.dim**0.5),
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            output_scale=output_scale,
            **options,
        )

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        return [replace(attention, scale=self.attention_multiplier)] * self.n_layers

    def small(self) -> dict[str, Any]:
        return {"attention_multiplier": 0.5, "logits_scaling": 2.0}


@dataclass(frozen=True)
class GraniteArgs(MultiplierArgs):
    """Dimensions of a Granite; logits are divided by `logits_scaling`."""

    rope_theta: float = 5000000.0
    tie_embeddings: bool = True

    def expand(self) -> DecoderSpec:
        """A Llama with factors."""
        return self.multiplied(1 / self.logits_scaling)


FLAVORS: dict[str, GraniteArgs] = {
    "debugmodel": GraniteArgs(256, 6, 8, 4, 768, 2048),
    "granite3.1_2b": GraniteArgs(
        *(2048, 40, 32, 8, 8192, 49155),
        rope_theta=5000000.0,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
    ),
    "granite3.1_8b": GraniteArgs(
        *(4096, 40, 32, 8, 12800, 49155),
        rope_theta=10000000.0,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
}

MULTIPLIERS = {
    "embedding_multiplier": ("embedding_multiplier", 1.0),
    "attention_multiplier": ("attention_multiplier", 1.0),
    "residual_multiplier": ("residual_multiplier", 1.0),
    "logits_scaling": ("logits_scaling", 1.0),
}

FAMILY = Family(
    name="granite",
    args=GraniteArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="granite",
        architecture="GraniteForCausalLM",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        numbers=MULTIPLIERS,
    ),
)
