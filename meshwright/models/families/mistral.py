"""Mistral 7B as data. Free of torch.

Source: Jiang et al. 2023, arXiv:2310.06825; dimensions come from the config.json of
mistralai/Mistral-7B-v0.1 and mistralai/Mistral-7B-v0.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.checks import check_window
from meshwright.models.config_json import Dimension, positive
from meshwright.models.family import VISION, Family, HuggingFaceForm
from meshwright.models.mup import MupArgs
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class MistralArgs(MupArgs):
    rope_theta: float = 1000000.0
    window: int | None = None
    """Tokens that a token sees, with itself, in every layer; None: all before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            check_window(self.window)

    def expand(self) -> DecoderSpec:
        """The report gives no initial values; these are Llama's."""
        return self.with_unit_logits()

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        """Return layers with the window, if there is one."""
        return [replace(attention, window=self.window)] * self.n_layers

    def small(self) -> dict[str, Any]:
        return {"window": 7 if self.window is not None else None}


def _read(config: Mapping[str, Any]) -> dict[str, Dimension]:
    value = config.get("sliding_window", 4096)
    window = None if value is None else positive("sliding_window", value)
    return {"window": Dimension("sliding_window", window)}


FLAVORS: dict[str, MistralArgs] = {
    "debugmodel": MistralArgs(256, 6, 8, 4, 768, 2048, window=64),
    "mistral_7b_v0.1": MistralArgs(4096, 32, 32, 8, 14336, 32000, rope_theta=1e4, window=4096),
    "mistral_7b_v0.3": MistralArgs(4096, 32, 32, 8, 14336, 32768),
}

FAMILY = Family(
    name="mistral",
    args=MistralArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="mistral",
        architecture="MistralForCausalLM",
        nested_in="mistral3",
        left_out=VISION,
        fixed={"hidden_act": "silu"},
        defaults={"num_key_value_heads": 8},
        read_own=_read,
        write_own=lambda args: {"sliding_window": args.window},
    ),
)
