"""Gemma 2 as data. Free of torch.

Source: Gemma Team 2024, arXiv:2408.00118; dimensions come from the config.json of
google/gemma-2-2b to google/gemma-2-27b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.checks import check_positive
from meshwright.models.config_json import Windows
from meshwright.models.families.gemma import DEFAULTS, NAMES, GemmaArgs
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class Gemma2Args(GemmaArgs):
    rope_theta: float = 10000.0
    full_every: int = 2
    attention_cap: float | None = 50.0
    """c: scores s become c tanh(s / c); None: they stay."""
    output_cap: float | None = 30.0
    """The same of logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        caps = ("attention_cap", "output_cap")
        check_positive(self, *(name for name in caps if getattr(self, name) is not None))

    def expand(self) -> DecoderSpec:
        """Every second layer is full; scores and logits are capped."""
        return self.gemma(output_cap=self.output_cap)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        return super().attention_layers(replace(attention, soft_cap=self.attention_cap))

    def small(self) -> dict[str, Any]:
        return super().small() | {"attention_cap": 2.0, "output_cap": 3.0}


FLAVORS: dict[str, Gemma2Args] = {
    "debugmodel": Gemma2Args(256, 6, 8, 4, 768, 2048, window=64),
    "gemma2_2b": Gemma2Args(2304, 26, 8, 4, 9216, 256000, head_dim=256),
    "gemma2_9b": Gemma2Args(3584, 42, 16, 8, 14336, 256000, head_dim=256),
    "gemma2_27b": Gemma2Args(4608, 46, 32, 16, 36864, 256000, head_dim=128, query_scale=144),
}

FAMILY = Family(
    name="gemma2",
    args=Gemma2Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        modules=NAMES,
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": None,
        },
        defaults={**DEFAULTS, "vocab_size": 256000},
        integers={"query_scale": "query_pre_attn_scalar"},
        caps={
            "attention_cap": ("attn_logit_softcapping", 50.0),
            "output_cap": ("final_logit_softcapping", 30.0),
        },
        windows=Windows(4096, every=2),
    ),
)
