"""The text models of Qwen3.5, the dense sizes, as data. Free of torch.

Source: Qwen Team 2026 (Qwen3.5); dimensions are the defaults of transformers 5.24 for
Qwen/Qwen3.5-9B.
"""

from dataclasses import dataclass

from meshwright.models.config_json import FullEvery
from meshwright.models.delta import DEBUG, GatedDeltaArgs
from meshwright.models.families.qwen3_next import (
    DEFAULTS,
    FILTERS,
    GATED,
    LINEAR,
    LINEAR_DIMENSIONS,
    NAMES,
)
from meshwright.models.family import VISION, Family, HuggingFaceForm, Joined
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class Qwen35TextArgs(GatedDeltaArgs):
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0

    def expand(self) -> DecoderSpec:
        """As Qwen3-Next's, without experts."""
        return self.with_unit_logits(qk_norm="head", has_norm_offset=True)


FLAVORS: dict[str, Qwen35TextArgs] = {
    "debugmodel": Qwen35TextArgs(**DEBUG, head_dim=48),
    "qwen3.5_9b": Qwen35TextArgs(4096, 32, 16, 4, 12288, 248320, head_dim=256),
}

FAMILY = Family(
    name="qwen3_5_text",
    args=Qwen35TextArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        nested_in="qwen3_5",
        left_out=("mtp.", *VISION),
        modules={
            **NAMES,
            **{
                f"layers.{{}}.attention.in_{part}": f"{LINEAR}.in_proj_{part}"
                for part in ("z", "b", "a")
            },
        },
        joined=(
            GATED,
            FILTERS,
            Joined(
                f"{LINEAR}.in_proj_qkv.weight",
                tuple(f"attention.in_{part}.weight" for part in "qkv"),
            ),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False},
        defaults={
            **DEFAULTS,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 12288,
            "vocab_size": 248320,
        },
        integers=LINEAR_DIMENSIONS,
        windows=FullEvery(every=4, pattern="full_attention_interval"),
        partial_rotary=0.25,
        # places in images; text has the same place in all sections
        ignored_rope_keys=("mrope_section", "mrope_interleaved"),
    ),
)
