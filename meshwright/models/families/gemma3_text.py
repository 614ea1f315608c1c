"""Gemma 3, its text models, as data. Free of torch.

Source: Gemma Team 2025, arXiv:2503.19786; dimensions come from the config.json of
google/gemma-3-270m to google/gemma-3-27b-pt.
"""

from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.checks import check_positive
from meshwright.models.config_json import Windows
from meshwright.models.families.gemma import DEFAULTS, NAMES, GemmaArgs
from meshwright.models.family import VISION, Family, HuggingFaceForm
from meshwright.models.rope_scaling import LinearScaling
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class Gemma3Args(GemmaArgs):
    rope_theta: float = 1000000.0
    window: int = 1024
    full_every: int = 6
    local_theta: float = 10000.0
    """`rope_theta` of layers with a window."""
    rope_scaling: LinearScaling | None = None
    """Of full layers; None: they aren't stretched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "local_theta")

    def expand(self) -> DecoderSpec:
        """Queries and keys are normalized, each head on its own."""
        return self.gemma(qk_norm="head", rope_scaling=self.rope_scaling)

    def windowed(self, attention: AttentionSpec) -> AttentionSpec:
        """Return the attention of layers with a window, whose rotation has its own theta."""
        assert attention.rope is not None
        rope = replace(attention.rope, theta=self.local_theta, scaling=None)
        return replace(super().windowed(attention), rope=rope)


def _gemma3(
    dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **others: Any
) -> Gemma3Args:
    options = {"vocab_size": 262208, "head_dim": 256, "rope_scaling": LinearScaling(8.0), **others}
    return Gemma3Args(dim, layers, heads, kv_heads, hidden, **options)


SMALL: dict[str, Any] = {"vocab_size": 262144, "window": 512, "rope_scaling": None}
"""Of the models that were never trained with longer contexts."""

FLAVORS: dict[str, Gemma3Args] = {
    "debugmodel": Gemma3Args(
        256, 6, 8, 4, 768, 2048, head_dim=48, query_scale=48, window=64, full_every=3
    ),
    "gemma3_270m": _gemma3(640, 18, 4, 1, 2048, **SMALL),
    "gemma3_1b": _gemma3(1152, 26, 4, 1, 6912, **SMALL),
    "gemma3_4b": _gemma3(2560, 34, 8, 4, 10240),
    "gemma3_12b": _gemma3(3840, 48, 16, 8, 15360),
    "gemma3_27b": _gemma3(5376, 62, 32, 16, 21504, head_dim=128, query_scale=168),
}

FAMILY = Family(
    name="gemma3_text",
    args=Gemma3Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        nested_in="gemma3",
        left_out=VISION,
        modules=NAMES,
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        defaults={**DEFAULTS, "vocab_size": 262208, "rope_theta": 1000000.0},
        integers={"query_scale": "query_pre_attn_scalar"},
        stretched_rope_type="linear",
        windows=Windows(4096, every=6, pattern="sliding_window_pattern"),
        nests_rope=True,
        local_theta=("rope_local_base_freq", 10000.0),
    ),
)
