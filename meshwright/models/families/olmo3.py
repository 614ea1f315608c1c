"""OLMo 3 as data. Free of torch.

Source: OLMo Team 2025 (OLMo 3 technical report); dimensions come from the config.json of
allenai/Olmo-3-1025-7B and allenai/Olmo-3-1125-32B.
"""

from dataclasses import dataclass, replace

from meshwright.models.args import WindowArgs
from meshwright.models.config_json import Windows
from meshwright.models.families.olmo2 import FAMILY as OLMO2
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.rope_scaling import Yarn
from meshwright.models.table import AttentionSpec, DecoderSpec


@dataclass(frozen=True)
class Olmo3Args(WindowArgs):
    norm_eps: float = 1e-6
    rope_scaling: Yarn | None = None
    """Of full layers; None: they aren't stretched."""

    def expand(self) -> DecoderSpec:
        """As OLMo 2, but for the windows."""
        return self.decoder(norm="post", qk_norm="all", rope_scaling=self.rope_scaling)

    def windowed(self, attention: AttentionSpec) -> AttentionSpec:
        """Return the attention of layers with a window, whose rotation is never stretched."""
        assert attention.rope is not None
        rope = replace(attention.rope, scaling=None)
        return replace(super().windowed(attention), rope=rope)


FLAVORS: dict[str, Olmo3Args] = {
    "debugmodel": Olmo3Args(256, 6, 8, 4, 768, 2048, window=64, full_every=3),
    "olmo3_7b": Olmo3Args(4096, 32, 32, 32, 11008, 100278),
    "olmo3_32b": Olmo3Args(5120, 64, 40, 8, 27648, 100278),
}

FAMILY = Family(
    name="olmo3",
    args=Olmo3Args,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        modules=OLMO2.hf.modules,
        fixed=OLMO2.hf.fixed,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        stretched_rope_type="yarn",
        windows=Windows(4096, every=4),
        nests_rope=True,
    ),
)
