"""OLMo 2 as data. Free of torch.

Source: OLMo Team 2024, arXiv:2501.00656; dimensions come from the config.json of
allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B and OLMo-2-0325-32B.
"""

from dataclasses import dataclass

from meshwright.models.args import DecoderArgs
from meshwright.models.family import MODULES, Family, HuggingFaceForm
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class Olmo2Args(DecoderArgs):
    norm_eps: float = 1e-6

    def expand(self) -> DecoderSpec:
        """Norms follow attention and feed-forward, and normalise queries and keys over
        all heads of a token. All matrices start with the same deviation (section 3.2)."""
        return self.decoder(norm="post", qk_norm="all")


FLAVORS: dict[str, Olmo2Args] = {
    "debugmodel": Olmo2Args(256, 6, 8, 4, 768, 2048),
    "olmo2_1b": Olmo2Args(2048, 16, 16, 16, 8192, 100352),
    "olmo2_7b": Olmo2Args(4096, 32, 32, 32, 11008, 100352),
    "olmo2_13b": Olmo2Args(5120, 40, 40, 40, 13824, 100352),
    "olmo2_32b": Olmo2Args(5120, 64, 40, 8, 27648, 100352),
}

FAMILY = Family(
    name="olmo2",
    args=Olmo2Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        modules={
            **MODULES,
            "layers.{}.attention_norm": "model.layers.{}.post_attention_layernorm",
            "layers.{}.ffn_norm": "model.layers.{}.post_feedforward_layernorm",
        },
        fixed={"hidden_act": "silu", "attention_bias": False},
        defaults={"rms_norm_eps": 1e-5},
    ),
)
