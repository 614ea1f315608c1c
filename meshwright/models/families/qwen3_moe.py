"""Qwen3, the sizes with experts, as data. Free of torch.

Source: Qwen Team 2025, arXiv:2505.09388; dimensions come from the config.json of
Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
"""

from dataclasses import dataclass

from meshwright.models.args import DenseFirstArgs
from meshwright.models.families.qwen3 import FAMILY as QWEN3
from meshwright.models.families.qwen3 import Qwen3Args
from meshwright.models.family import EXPERTS, MODULES, Family, HuggingFaceForm


@dataclass(frozen=True)
class Qwen3MoeArgs(Qwen3Args, DenseFirstArgs):
    """Dimensions of a Qwen3 with experts."""

    n_experts: int = 128
    n_active: int = 8


FLAVORS: dict[str, Qwen3MoeArgs] = {
    "debugmodel": Qwen3MoeArgs(
        256, 6, 8, 4, 768, 2048, head_dim=48, n_experts=16, n_active=4, expert_dim=192
    ),
    "qwen3_30b_a3b": Qwen3MoeArgs(2048, 48, 32, 4, 6144, 151936, head_dim=128),
    "qwen3_235b_a22b": Qwen3MoeArgs(4096, 94, 64, 4, 12288, 151936, head_dim=128, expert_dim=1536),
}

FAMILY = Family(
    name="qwen3_moe",
    args=Qwen3MoeArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        modules={**MODULES, **EXPERTS},
        fixed={**QWEN3.hf.fixed, "decoder_sparse_step": 1},
        defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 4},
        integers={
            "n_experts": "num_experts",
            "n_active": "num_experts_per_tok",
            "expert_dim": "moe_intermediate_size",
        },
        flags={"normalize_experts": ("norm_topk_prob", False)},
        dense_layers=("n_dense_layers", "mlp_only_layers"),
    ),
    dense=QWEN3,
)
