"""Qwen3-Next as data. Free of torch.

Source: Qwen Team 2025 (Qwen3-Next); dimensions come from the config.json of
Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from dataclasses import dataclass
from typing import Any

from meshwright.models.args import STD
from meshwright.models.checks import check_positive
from meshwright.models.config_json import FullEvery
from meshwright.models.delta import DEBUG, GatedDeltaArgs
from meshwright.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.family import EXPERTS, MODULES, Family, HuggingFaceForm, Joined
from meshwright.models.table import DecoderSpec, FeedForwardSpec, MixtureSpec


@dataclass(frozen=True)
class Qwen3NextArgs(GatedDeltaArgs, Qwen3MoeArgs):
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    n_experts: int = 512
    n_active: int = 10
    expert_dim: int = 512
    shared_expert_dim: int = 512
    """FFN hidden size of the expert that every token goes through."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "shared_expert_dim")

    def expand(self) -> DecoderSpec:
        """As Qwen3's, with norms that multiply by 1 + w."""
        return self.with_unit_logits(qk_norm="head", has_norm_offset=True)

    def mixture(self, hidden_dim: int, out_std: float, **options: Any) -> MixtureSpec:
        """Return experts next to one that all tokens go through, with a gate."""
        shared = FeedForwardSpec(
            self.dim, self.shared_expert_dim, STD, out_std, width_key="shared_expert_dim"
        )
        return super().mixture(hidden_dim, out_std, shared=shared, is_shared_gated=True, **options)

    def of_width(self, dim: int) -> dict[str, int]:
        shared = self.scaled(self.shared_expert_dim, dim)
        return super().of_width(dim) | {"shared_expert_dim": shared}

    def small(self) -> dict[str, Any]:
        return super().small() | {"shared_expert_dim": 40}


FLAVORS: dict[str, Qwen3NextArgs] = {
    "debugmodel": Qwen3NextArgs(
        **DEBUG, head_dim=48, n_experts=16, n_active=4, expert_dim=192, shared_expert_dim=192
    ),
    "qwen3_next_80b_a3b": Qwen3NextArgs(2048, 48, 16, 2, 5120, 151936, head_dim=256),
}

SELF, LINEAR, MLP = (f"model.layers.{{}}.{part}" for part in ("self_attn", "linear_attn", "mlp"))

GATED = Joined(f"{SELF}.q_proj.weight", ("attention.wq.weight", "attention.wg.weight"), "n_heads")
"""Of each head, the query's rows and the gate's."""

FILTERS = Joined(
    f"{LINEAR}.conv1d.weight",
    tuple(f"attention.conv_{part}.weight" for part in "qkv"),
    is_filter=True,
)

NAMES = {
    **MODULES,
    "layers.{}.attention.wg": f"{SELF}.q_proj",
    "layers.{}.attention.a_log.weight": f"{LINEAR}.A_log",
    "layers.{}.attention.dt_bias.weight": f"{LINEAR}.dt_bias",
    "layers.{}.attention.norm": f"{LINEAR}.norm",
    "layers.{}.attention.out": f"{LINEAR}.out_proj",
}
"""Our names of modules and theirs, in Qwen3.5 too; `joined` has the others."""

LINEAR_DIMENSIONS = {
    name: name
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}

DEFAULTS: dict[str, object] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

FAMILY = Family(
    name="qwen3_next",
    args=Qwen3NextArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        left_out=("mtp.",),
        modules={
            **NAMES,
            **EXPERTS,
            "layers.{}.feed_forward.shared.w1": f"{MLP}.shared_expert.gate_proj",
            "layers.{}.feed_forward.shared.w2": f"{MLP}.shared_expert.down_proj",
            "layers.{}.feed_forward.shared.w3": f"{MLP}.shared_expert.up_proj",
            "layers.{}.feed_forward.shared_gate": f"{MLP}.shared_expert_gate",
        },
        joined=(
            GATED,
            FILTERS,
            Joined(
                f"{LINEAR}.in_proj_qkvz.weight",
                tuple(f"attention.in_{part}.weight" for part in "qkvz"),
                "linear_num_key_heads",
            ),
            Joined(
                f"{LINEAR}.in_proj_ba.weight",
                tuple(f"attention.in_{part}.weight" for part in "ba"),
                "linear_num_key_heads",
            ),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1},
        defaults={**DEFAULTS, "num_key_value_heads": 2, "intermediate_size": 5632}
        | {"num_experts": 512, "num_experts_per_tok": 10}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        integers={
            **QWEN3_MOE.hf.integers,
            **LINEAR_DIMENSIONS,
            "shared_expert_dim": "shared_expert_intermediate_size",
        },
        flags={"normalize_experts": ("norm_topk_prob", True)},
        dense_layers=QWEN3_MOE.hf.dense_layers,
        windows=FullEvery(every=4, pattern="full_attention_interval"),
        partial_rotary=0.25,
    ),
)
