"""Dimensions, names and keys that DeepSeek-V2 and V3 share. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.args import DEBUG_SIZE, STD, DenseFirstArgs
from meshwright.models.checks import check_positive
from meshwright.models.config_json import Dimension, positive
from meshwright.models.family import EXPERTS, MODULES
from meshwright.models.latent import LatentArgs
from meshwright.models.table import DecoderSpec, FeedForwardSpec, MixtureSpec


@dataclass(frozen=True)
class DeepseekArgs(LatentArgs, DenseFirstArgs):
    """Dimensions of a DeepSeek: latent attention, and experts next to a shared one."""

    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    expert_dim: int = 1408
    n_dense_layers: int = 1
    n_shared_experts: int = 2
    """Experts that every token goes through, as one feed-forward of so many times the width."""
    n_groups: int = 1
    """Groups of experts of equal size."""
    n_active_groups: int = 1
    """Groups that a token's experts are in."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of a token's experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_shared_experts", "n_groups", "n_active_groups")
        check_positive(self, "routed_scaling_factor")
        self.mixture(self.expert_dim, STD)  # it checks the groups

    @property
    def router(self) -> dict[str, Any]:
        """Fields of `MixtureSpec`."""
        groups = {"n_groups": self.n_groups, "n_active_groups": self.n_active_groups}
        return {"scale": self.routed_scaling_factor, **groups}

    def expand(self) -> DecoderSpec:
        """The reports' initial values are 0.006 at widths of 5120 and 7168; these make logits of
        variance 1 at any width."""
        return self.with_unit_logits(rope_scaling=self.rope_scaling)

    def mixture(self, hidden_dim: int, out_std: float, **options: Any) -> MixtureSpec:
        """Return experts next to one that all tokens go through."""
        width, key = hidden_dim * self.n_shared_experts, "expert_dim * n_shared_experts"
        shared = FeedForwardSpec(self.dim, width, STD, out_std, width_key=key)
        return super().mixture(hidden_dim, out_std, shared=shared, **self.router, **options)

    def small(self) -> dict[str, Any]:
        groups = {
            "n_groups": min(self.n_groups, 4),
            "n_active_groups": min(self.n_active_groups, 2),
        }
        return super().small() | groups


SELF, MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"

NAMES = {
    **MODULES,
    **EXPERTS,
    "layers.{}.attention.wq_a": f"{SELF}.q_a_proj",
    "layers.{}.attention.q_norm": f"{SELF}.q_a_layernorm",
    "layers.{}.attention.wq_b": f"{SELF}.q_b_proj",
    "layers.{}.attention.wkv_a": f"{SELF}.kv_a_proj_with_mqa",
    "layers.{}.attention.kv_norm": f"{SELF}.kv_a_layernorm",
    "layers.{}.attention.wkv_b": f"{SELF}.kv_b_proj",
    "layers.{}.feed_forward.shared.w1": f"{MLP}.shared_experts.gate_proj",
    "layers.{}.feed_forward.shared.w2": f"{MLP}.shared_experts.down_proj",
    "layers.{}.feed_forward.shared.w3": f"{MLP}.shared_experts.up_proj",
}

INTEGERS = {
    "n_experts": "n_routed_experts",
    "n_active": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}

SIZES: dict[str, object] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Values of absent keys, in both classes of transformers."""


def read(config: Mapping[str, Any], dense: int, groups: tuple[int, int]) -> dict[str, Dimension]:
    """Read the dimensions of both families that no field of `HuggingFaceForm` says.

    Args:
        dense: first layers without experts, where no key says it.
        groups: the number of groups, and of a token's groups, where no key says it.
    """
    rank, keys = config.get("q_lora_rank", 1536) or 0, ("n_group", "topk_group")
    theirs = [config.get(key) or usual for key, usual in zip(keys, groups, strict=True)]
    rotated = config.get("qk_rope_head_dim", SIZES["qk_rope_head_dim"])
    if config.get("head_dim", rotated) not in (rotated, None):
        raise ValueError(f"head_dim is {config['head_dim']!r}, not qk_rope_head_dim = {rotated}")
    dense = config.get("first_k_dense_replace", dense)
    if type(dense) is not int or dense < 0:
        raise ValueError(f"first_k_dense_replace is {dense!r}, not an integer from 0 on")
    return {
        "head_dim": Dimension("head_dim", None),  # heads have their own widths
        "q_lora_rank": Dimension("q_lora_rank", rank and positive("q_lora_rank", rank)),
        "n_groups": Dimension(keys[0], positive(keys[0], theirs[0])),
        "n_active_groups": Dimension(keys[1], positive(keys[1], theirs[1])),
        "n_dense_layers": Dimension("first_k_dense_replace", dense),
    }


def write(args: DeepseekArgs) -> dict[str, object]:
    """Return the keys that `read` reads."""
    return {
        "head_dim": args.qk_rope_head_dim,
        "q_lora_rank": args.q_lora_rank or None,
        "n_group": args.n_groups,
        "topk_group": args.n_active_groups,
        "first_k_dense_replace": args.n_dense_layers,
    }


DEBUG: dict[str, Any] = DEBUG_SIZE | {
    "n_kv_heads": 8,
    "n_experts": 16,
    "n_active": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
"""What the debug models of both families share."""
