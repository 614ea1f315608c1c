"""HyperCLOVA X SEED Think as data. Free of torch.

Source: NAVER Cloud 2025 (HyperCLOVA X THINK), arXiv:2506.22403; defaults come from the
config.json of naver-hyperclovax/HyperCLOVAX-SEED-Think-14B, whose folder `model.flavor` reads.
"""

from dataclasses import dataclass

from meshwright.models.families.granite import MULTIPLIERS, MultiplierArgs
from meshwright.models.family import MODULES, Family, HuggingFaceForm
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class HyperClovaXArgs(MultiplierArgs):
    """Dimensions of a HyperCLOVA X; logits are multiplied by `logits_scaling`."""

    rope_theta: float = 100000000.0
    embedding_multiplier: float = 10.0
    attention_multiplier: float = 0.0078125
    residual_multiplier: float = 1.0
    logits_scaling: float = 0.125

    def expand(self) -> DecoderSpec:
        """As Granite, with norms before and after (the report's Peri-LN)."""
        return self.multiplied(self.logits_scaling, norm="sandwich")


FLAVORS: dict[str, HyperClovaXArgs] = {
    "debugmodel": HyperClovaXArgs(256, 6, 8, 4, 768, 2048),
}

FAMILY = Family(
    name="hyperclovax",
    args=HyperClovaXArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        modules={
            **MODULES,
            "layers.{}.post_attention_norm": "model.layers.{}.post_norm1",
            "layers.{}.post_ffn_norm": "model.layers.{}.post_norm2",
        },
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_post_norm": True,
        },
        numbers=MULTIPLIERS,
    ),
)
