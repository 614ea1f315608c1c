"""Qwen3, the sizes with experts, as data. Free of torch.

Source: Qwen Team 2025, arXiv:2505.09388; dimensions come from the config.json of
Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.models.args import ExpertArgs
from meshwright.models.checks import check_positive
from meshwright.models.families.qwen3 import FAMILY as QWEN3
from meshwright.models.families.qwen3 import Qwen3Args
from meshwright.models.family import EXPERTS, MODULES, Family, HuggingFaceForm
from meshwright.models.table import MixtureSpec


@dataclass(frozen=True)
class Qwen3MoeArgs(Qwen3Args, ExpertArgs):
    """Dimensions of a Qwen3 with experts."""

    n_experts: int = 128
    n_active: int = 8
    expert_dim: int = 768
    """FFN hidden size F of an expert."""
    n_dense_layers: int = 0
    """First layers that have one feed-forward of `hidden_dim` instead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "expert_dim")
        if not 0 <= self.n_dense_layers < self.n_layers:
            raise ValueError(
                f"n_dense_layers = {self.n_dense_layers}: must be at least 0 and below n_layers = "
                f"{self.n_layers}: use {self.n_layers - 1}"
            )

    def small(self) -> dict[str, Any]:
        return super().small() | {"expert_dim": 24, "n_dense_layers": min(self.n_dense_layers, 1)}

    def expert_layers(self, out_std: float) -> Sequence[MixtureSpec | None]:
        """As the base's, with their own width, after the dense layers."""
        mixture, dense = self.mixture(self.expert_dim, out_std), self.n_dense_layers
        return [*[None] * dense, *[mixture] * (self.n_layers - dense)]


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
