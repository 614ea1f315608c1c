"""OLMo Hybrid as data. Free of torch.

Source: OLMo Team 2026 (OLMo Hybrid); dimensions are the defaults of transformers 5.24 for
allenai/Olmo-Hybrid-7B.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.config_json import Dimension, FullEvery, positive
from meshwright.models.delta import DEBUG, DeltaArgs, DeltaSpec
from meshwright.models.families.olmo2 import FAMILY as OLMO2
from meshwright.models.families.qwen3_next import LINEAR
from meshwright.models.family import Family, HuggingFaceForm, Joined
from meshwright.models.table import AttentionSpec, DecoderSpec

NORM_EPS = 1e-5
"""Of what a head of linear attention gives, in transformers' and FLA's code."""


@dataclass(frozen=True)
class OlmoHybridArgs(DeltaArgs):
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 30
    linear_num_value_heads: int = 30
    linear_key_head_dim: int = 96
    linear_value_head_dim: int = 192
    linear_allow_neg_eigval: bool = True
    """The strength with which linear attention writes is up to 2, not 1."""
    rotates: bool = False
    """Softmax attention rotates queries and keys; otherwise it knows no positions (NoPE)."""

    def expand(self) -> DecoderSpec:
        """Norms precede linear attention and its feed-forward, and follow softmax attention and its
        own, as in OLMo 2."""
        spec = self.decoder(norm="post", qk_norm="all")
        layers = [
            replace(one, norm="pre") if isinstance(one.attention, DeltaSpec) else one
            for one in spec.layers
        ]
        return replace(spec, layers=tuple(layers))

    def softmax_attention(self, attention: AttentionSpec) -> AttentionSpec:
        return attention if self.rotates else replace(attention, rope=None)

    def linear_attention(self, attention: AttentionSpec) -> DeltaSpec:
        scale = 2.0 if self.linear_allow_neg_eigval else 1.0
        linear = super().linear_attention(attention)
        return replace(linear, norm_eps=NORM_EPS, strength_scale=scale)


FLAVORS: dict[str, OlmoHybridArgs] = {
    "debugmodel": OlmoHybridArgs(**DEBUG),
    "olmo_hybrid_7b": OlmoHybridArgs(3840, 32, 30, 30, 11008, 100352),
}

HEADS = ("linear_num_key_heads", "linear_num_value_heads")
WIDTHS = ("linear_key_head_dim", "linear_value_head_dim")


def _read(config: Mapping[str, Any]) -> dict[str, Dimension]:
    """Read the heads of linear attention: absent, they are as many as others, and narrower."""
    heads = config.get("num_attention_heads", 30)
    found = {key: positive(key, config.get(key) or heads) for key in HEADS}
    width, wide = (config.get(key) for key in WIDTHS)
    width = width or int(0.75 * config.get("hidden_size", 3840) / found[HEADS[0]])
    found |= {
        WIDTHS[0]: positive(WIDTHS[0], width),
        WIDTHS[1]: positive(WIDTHS[1], wide or 2 * width),
    }
    return {key: Dimension(key, value) for key, value in found.items()}


def _write(args: OlmoHybridArgs) -> dict[str, object]:
    theta = args.rope_theta if args.rotates else None
    rope = {"rope_type": "default", "rope_theta": theta}
    heads = {key: getattr(args, key) for key in (*HEADS, *WIDTHS)}
    return {**heads, "rope_theta": theta, "rope_parameters": rope}


FAMILY = Family(
    name="olmo_hybrid",
    args=OlmoHybridArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        modules={
            **OLMO2.hf.modules,
            **{
                f"layers.{{}}.attention.in_{ours}": f"{LINEAR}.{theirs}_proj"
                for ours, theirs in zip("qkvzba", "qkvgba", strict=True)
            },
            "layers.{}.attention.a_log.weight": f"{LINEAR}.A_log",
            "layers.{}.attention.dt_bias.weight": f"{LINEAR}.dt_bias",
            "layers.{}.attention.norm": f"{LINEAR}.o_norm",
            "layers.{}.attention.out": f"{LINEAR}.o_proj",
        },
        linear_modules={
            "layers.{}.attention_norm": "model.layers.{}.attention_layer_norm",
            "layers.{}.ffn_norm": "model.layers.{}.feedforward_layer_norm",
        },
        joined=tuple(
            Joined(
                f"{LINEAR}.{part}_conv1d.weight", (f"attention.conv_{part}.weight",), is_filter=True
            )
            for part in "qkv"
        ),
        fixed={"hidden_act": "silu", "attention_bias": False},
        defaults={
            "hidden_size": 3840,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "intermediate_size": 11008,
            "vocab_size": 100352,
            "linear_conv_kernel_dim": 4,
        },
        integers={"linear_conv_kernel_dim": "linear_conv_kernel_dim"},
        flags={"linear_allow_neg_eigval": ("linear_allow_neg_eigval", True)},
        rotates="rotates",
        windows=FullEvery(every=4),
        read_own=_read,
        write_own=_write,
    ),
)
