"""Qwen2 and Qwen2.5 as data. Free of torch.

Source: Qwen Team 2024, arXiv:2412.15115; dimensions come from the config.json of Qwen/Qwen2.5-0.5B
to Qwen/Qwen2.5-72B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.mup import MupArgs
from meshwright.models.rope_scaling import Yarn
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class Qwen2Args(MupArgs):
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_scaling: Yarn | None = None

    def expand(self) -> DecoderSpec:
        """The report gives no initial values."""
        return self.with_unit_logits(rope_scaling=self.rope_scaling)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        """Return layers whose projections to queries, keys and values have biases."""
        return [replace(attention, biases=("wq", "wk", "wv"))] * self.n_layers


FLAVORS: dict[str, Qwen2Args] = {
    "debugmodel": Qwen2Args(256, 6, 8, 4, 768, 2048),
    "qwen2.5_0.5b": Qwen2Args(896, 24, 14, 2, 4864, 151936, tie_embeddings=True),
    "qwen2.5_1.5b": Qwen2Args(1536, 28, 12, 2, 8960, 151936, tie_embeddings=True),
    "qwen2.5_3b": Qwen2Args(2048, 36, 16, 2, 11008, 151936, tie_embeddings=True),
    "qwen2.5_7b": Qwen2Args(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5_14b": Qwen2Args(5120, 48, 40, 8, 13824, 152064, norm_eps=1e-5),
    "qwen2.5_32b": Qwen2Args(5120, 64, 40, 8, 27648, 152064, norm_eps=1e-5),
    "qwen2.5_72b": Qwen2Args(8192, 80, 64, 8, 29568, 152064, norm_eps=1e-5),
}

FAMILY = Family(
    name="qwen2",
    args=Qwen2Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        defaults={"num_key_value_heads": 32},
        stretched_rope_type="yarn",
    ),
)
