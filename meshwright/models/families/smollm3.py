"""SmolLM3 as data. Free of torch.

Source: Hugging Face 2025 (huggingface.co/blog/smollm3); dimensions come from the config.json of
HuggingFaceTB/SmolLM3-3B-Base.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.args import DecoderArgs
from meshwright.models.checks import check_positive
from meshwright.models.config_json import Dimension, positive
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.rope_scaling import Yarn
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class SmolLM3Args(DecoderArgs):
    """Dimensions of a SmolLM3."""

    norm_eps: float = 1e-6
    rope_theta: float = 5000000.0
    tie_embeddings: bool = True
    no_rope_every: int = 4
    """Every layer of this number, counted from 1, knows no positions (NoPE)."""
    rope_scaling: Yarn | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "no_rope_every")

    @property
    def resolved(self) -> "SmolLM3Args":
        return replace(super().resolved, no_rope_every=min(self.no_rope_every, self.n_layers + 1))

    def expand(self) -> DecoderSpec:
        """The report gives no initial values."""
        return self.with_unit_logits(rope_scaling=self.rope_scaling)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        """Return layers that rotate, and at every `no_rope_every`-th place one that doesn't."""
        without = replace(attention, rope=None)
        places = range(1, self.n_layers + 1)
        return [without if place % self.no_rope_every == 0 else attention for place in places]

    def small(self) -> dict[str, Any]:
        return {"no_rope_every": 2}


def _read(config: Mapping[str, Any]) -> dict[str, Dimension]:
    key, count = "no_rope_layer_interval", config["num_hidden_layers"]
    every, layers = positive(key, config.get(key, 4)), config.get("no_rope_layers")
    if layers is not None:
        key = "no_rope_layers"
        every = layers.index(0) + 1 if isinstance(layers, list) and 0 in layers else count + 1
        if layers != [int(place % every != 0) for place in range(1, count + 1)]:
            rule = "this model has a 0 at every k-th place, and 1 elsewhere"
            raise ValueError(f"{key} is {layers!r}; {rule}")
    return {"no_rope_every": Dimension(key, min(every, count + 1))}


def _write(args: SmolLM3Args) -> dict[str, object]:
    every, places = args.no_rope_every, range(1, args.n_layers + 1)
    layers = [int(place % every != 0) for place in places]
    return {"no_rope_layer_interval": every, "no_rope_layers": layers}


FLAVORS: dict[str, SmolLM3Args] = {
    "debugmodel": SmolLM3Args(256, 6, 8, 4, 768, 2048),
    "smollm3_3b": SmolLM3Args(2048, 36, 16, 4, 11008, 128256),
}

FAMILY = Family(
    name="smollm3",
    args=SmolLM3Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
        },
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        stretched_rope_type="yarn",
        read_own=_read,
        write_own=_write,
    ),
)
