"""Llama 2 and 3, as data. Free of torch, so that a config is checked before torch is loaded.

Source: Touvron et al. 2023, arXiv:2307.09288; Llama Team 2024, arXiv:2407.21783.
"""

from dataclasses import dataclass

from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.mup import MupArgs
from meshwright.models.rope_scaling import RopeScaling
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class LlamaArgs(MupArgs):
    rope_scaling: RopeScaling | None = None

    def expand(self) -> DecoderSpec:
        return self.with_unit_logits(rope_scaling=self.rope_scaling)


def _llama3(
    dim: int, layers: int, heads: int, hidden: int, stretch: float | None, tied: bool = False
) -> LlamaArgs:
    scaling = RopeScaling(factor=stretch) if stretch else None
    return LlamaArgs(
        dim, layers, heads, 8, hidden, 128256, rope_scaling=scaling, tie_embeddings=tied
    )


FLAVORS: dict[str, LlamaArgs] = {
    "debugmodel": LlamaArgs(256, 6, 8, 4, 768, 2048),
    "llama2_7b": LlamaArgs(4096, 32, 32, 32, 11008, 32000, rope_theta=10000.0),
    "llama2_13b": LlamaArgs(5120, 40, 40, 40, 13824, 32000, rope_theta=10000.0),
    "llama2_70b": LlamaArgs(8192, 80, 64, 8, 28672, 32000, rope_theta=10000.0),
    "llama3_1b": _llama3(2048, 16, 32, 8192, stretch=32.0, tied=True),  # Llama 3.2 1B
    "llama3_3b": _llama3(3072, 28, 24, 8192, stretch=32.0, tied=True),  # Llama 3.2 3B
    "llama3_8b": _llama3(4096, 32, 32, 14336, stretch=None),  # Llama 3 8B
    "llama3.1_8b": _llama3(4096, 32, 32, 14336, stretch=8.0),
    "llama3_70b": _llama3(8192, 80, 64, 28672, stretch=None),  # Llama 3 70B
    "llama3.1_70b": _llama3(8192, 80, 64, 28672, stretch=8.0),
    "llama3.1_405b": _llama3(16384, 126, 128, 53248, stretch=8.0),
}

FAMILY = Family(
    name="llama",
    args=LlamaArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        defaults={"rms_norm_eps": 1e-6},
        stretched_rope_type="llama3",
    ),
)
