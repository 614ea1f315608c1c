"""DeepSeek-V3 as data, and models of its shape: Moonlight and Kimi K2. Free of torch.

Source: DeepSeek-AI 2024, arXiv:2412.19437; dimensions come from the config.json of
deepseek-ai/DeepSeek-V3-Base, moonshotai/Moonlight-16B-A3B and moonshotai/Kimi-K2-Base.
"""

from dataclasses import dataclass
from typing import Any

from meshwright.models.families.deepseek import (
    DEBUG,
    INTEGERS,
    NAMES,
    SIZES,
    DeepseekArgs,
    read,
    write,
)
from meshwright.models.family import PREDICTORS, Family, HuggingFaceForm
from meshwright.models.rope_scaling import Yarn


@dataclass(frozen=True)
class DeepseekV3Args(DeepseekArgs):
    n_experts: int = 256
    n_active: int = 8
    q_lora_rank: int = 1536
    expert_dim: int = 2048
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    n_dense_layers: int = 3

    @property
    def router(self) -> dict[str, Any]:
        return super().router | {"scores": "sigmoid", "normalizer_eps": 1e-20}


FLAVORS: dict[str, DeepseekV3Args] = {
    "debugmodel": DeepseekV3Args(
        **DEBUG,
        q_lora_rank=96,
        expert_dim=192,
        n_groups=4,
        n_active_groups=2,
        n_dense_layers=1,
    ),
    "moonlight_16b_a3b": DeepseekV3Args(
        *(2048, 27, 16, 16, 11264, 163840),
        norm_eps=1e-5,
        rope_theta=50000.0,
        n_experts=64,
        n_active=6,
        q_lora_rank=0,
        expert_dim=1408,
        n_shared_experts=2,
        routed_scaling_factor=2.446,
        n_dense_layers=1,
    ),
    "deepseek_v3": DeepseekV3Args(
        *(7168, 61, 128, 128, 18432, 129280),
        n_groups=8,
        n_active_groups=4,
        rope_scaling=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    "kimi_k2": DeepseekV3Args(
        *(7168, 61, 64, 64, 18432, 163840),
        rope_theta=50000.0,
        n_experts=384,
        routed_scaling_factor=2.827,
        n_dense_layers=1,
        rope_scaling=Yarn(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
}

FAMILY = Family(
    name="deepseek_v3",
    args=DeepseekV3Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        aliases=("kimi_k2",),
        state={
            "layers.{}.feed_forward.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
        },
        quantizations=("fp8",),
        predictors="num_nextn_predict_layers",
        modules=NAMES | PREDICTORS,
        rotated=(),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_interleave": True,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        defaults={**SIZES, "n_routed_experts": 256, "num_experts_per_tok": 8}
        | {"n_shared_experts": 1, "moe_intermediate_size": 2048, "num_key_value_heads": 128},
        integers=INTEGERS,
        numbers={"routed_scaling_factor": ("routed_scaling_factor", 2.5)},
        flags={"normalize_experts": ("norm_topk_prob", True)},
        stretched_rope_type="yarn",
        read_own=lambda config: read(config, 3, (8, 4)),
        write_own=write,
    ),
)
