"""Qwen3, the dense sizes, as data. Free of torch.

Source: Qwen Team 2025, arXiv:2505.09388; dimensions come from the config.json of Qwen/Qwen3-0.6B
to Qwen/Qwen3-32B.
"""

from dataclasses import dataclass

from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.mup import MupArgs
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class Qwen3Args(MupArgs):
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0

    def expand(self) -> DecoderSpec:
        """Queries and keys are normalised, each head on its own. The report gives no
        initial values."""
        return self.with_unit_logits(qk_norm="head")


def _qwen3(dim: int, layers: int, heads: int, hidden: int, tied: bool = False) -> Qwen3Args:
    return Qwen3Args(dim, layers, heads, 8, hidden, 151936, tie_embeddings=tied, head_dim=128)


FLAVORS: dict[str, Qwen3Args] = {
    "debugmodel": Qwen3Args(256, 6, 8, 4, 768, 2048, head_dim=48),
    "qwen3_0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3_1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3_4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3_8b": _qwen3(4096, 36, 32, 12288),
    "qwen3_14b": _qwen3(5120, 40, 40, 17408),
    "qwen3_32b": _qwen3(5120, 64, 64, 25600),
}

FAMILY = Family(
    name="qwen3",
    args=Qwen3Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
        defaults={"head_dim": 128, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    ),
)
