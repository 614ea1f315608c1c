"""DeepSeek-V2 as data, V2-Lite among its sizes. Free of torch.

Source: DeepSeek-AI 2024, arXiv:2405.04434; dimensions come from the config.json of
deepseek-ai/DeepSeek-V2-Lite and deepseek-ai/DeepSeek-V2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.config_json import Dimension
from meshwright.models.families.deepseek import (
    DEBUG,
    INTEGERS,
    NAMES,
    SIZES,
    DeepseekArgs,
    read,
    write,
)
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.rope_scaling import Yarn


@dataclass(frozen=True)
class DeepseekV2Args(DeepseekArgs):
    normalize_experts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize_experts:
            raise ValueError("normalize_experts = true: a DeepSeek-V2 never normalizes: use false")

    @property
    def router(self) -> dict[str, Any]:
        return super().router | {"n_best": 1}


def _read(config: Mapping[str, Any]) -> dict[str, Dimension]:
    found, method = read(config, 0, (1, 1)), config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method is {method!r}, not greedy or group_limited_greedy")
    if method == "greedy":  # whatever the number of groups
        found |= {key: Dimension("topk_method", 1) for key in ("n_groups", "n_active_groups")}
    return found


def _write(args: DeepseekV2Args) -> dict[str, object]:
    is_grouped = args.n_active_groups < args.n_groups
    return write(args) | {"topk_method": "group_limited_greedy" if is_grouped else "greedy"}


YARN = Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)

FLAVORS: dict[str, DeepseekV2Args] = {
    "debugmodel": DeepseekV2Args(**DEBUG, expert_dim=96),
    "deepseek_v2_lite": DeepseekV2Args(
        2048, 27, 16, 16, 10944, 102400, n_experts=64, n_active=6, rope_scaling=YARN
    ),
    "deepseek_v2": DeepseekV2Args(
        *(5120, 60, 128, 128, 12288, 102400),
        n_experts=160,
        n_active=6,
        q_lora_rank=1536,
        expert_dim=1536,
        n_groups=8,
        n_active_groups=3,
        routed_scaling_factor=16.0,
        rope_scaling=YARN,
    ),
}

FAMILY = Family(
    name="deepseek_v2",
    args=DeepseekV2Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        modules=NAMES,
        rotated=(),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
        },
        defaults={**SIZES, "n_routed_experts": 64, "n_shared_experts": 2},
        integers=INTEGERS,
        numbers={"routed_scaling_factor": ("routed_scaling_factor", 1.0)},
        stretched_rope_type="yarn",
        read_own=_read,
        write_own=_write,
    ),
)
