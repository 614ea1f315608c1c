"""Mixtral as data. Free of torch.

Source: Jiang et al. 2024, arXiv:2401.04088; dimensions come from the config.json of
mistralai/Mixtral-8x7B-v0.1.
"""

from dataclasses import dataclass

from meshwright.models.args import ExpertArgs
from meshwright.models.families.llama import FAMILY as LLAMA
from meshwright.models.family import MODULES, Family, HuggingFaceForm
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class MixtralArgs(ExpertArgs):
    """Dimensions of a Mixtral; `hidden_dim` is the FFN hidden size of an expert."""

    rope_theta: float = 1000000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.normalize_experts:
            raise ValueError("normalize_experts = false: a Mixtral always normalizes: use true")

    def expand(self) -> DecoderSpec:
        """As Llama's. The paper gives no initial values."""
        return self.with_unit_logits()


FLAVORS: dict[str, MixtralArgs] = {
    "debugmodel": MixtralArgs(256, 6, 8, 4, 384, 2048),
    "mixtral_8x7b": MixtralArgs(4096, 32, 32, 8, 14336, 32000),
}

MOE = "model.layers.{}.block_sparse_moe"

FAMILY = Family(
    name="mixtral",
    args=MixtralArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        modules={
            **MODULES,
            "layers.{}.feed_forward.router": MOE + ".gate",
            "layers.{}.feed_forward.experts.w1": MOE + ".experts.{expert}.w1",
            "layers.{}.feed_forward.experts.w2": MOE + ".experts.{expert}.w2",
            "layers.{}.feed_forward.experts.w3": MOE + ".experts.{expert}.w3",
        },
        fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
        integers={"n_experts": "num_local_experts", "n_active": "num_experts_per_tok"},
    ),
    dense=LLAMA,
)
