"""OLMoE as data. Free of torch.

Source: Muennighoff et al. 2024, arXiv:2409.02060; dimensions come from the config.json of
allenai/OLMoE-1B-7B-0924.
"""

from dataclasses import dataclass

from meshwright.models.args import ExpertArgs
from meshwright.models.family import EXPERTS, MODULES, Family, HuggingFaceForm
from meshwright.models.table import DecoderSpec


@dataclass(frozen=True)
class OlmoeArgs(ExpertArgs):
    """Dimensions of an OLMoE; `hidden_dim` is the FFN hidden size of an expert."""

    rope_theta: float = 10000.0
    n_experts: int = 64
    n_active: int = 8
    normalize_experts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.dim // self.n_heads
        if self.head_dim and self.head_dim * self.n_heads != self.dim:
            raise ValueError(
                f"head_dim = {self.head_dim}: an OLMoE has dim / n_heads = {width}: use {width}"
            )

    def expand(self) -> DecoderSpec:
        """Queries and keys are normalised over all heads of a token. All matrices start with the
        same deviation (table 10)."""
        return self.decoder(qk_norm="all")


FLAVORS: dict[str, OlmoeArgs] = {
    "debugmodel": OlmoeArgs(256, 6, 8, 8, 192, 2048, n_experts=16, n_active=4),
    "olmoe_1b_7b": OlmoeArgs(2048, 16, 16, 16, 1024, 50304),
}

FAMILY = Family(
    name="olmoe",
    args=OlmoeArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        modules={**MODULES, **EXPERTS},
        fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
        defaults={"rms_norm_eps": 1e-5},
        integers={"n_experts": "num_experts", "n_active": "num_experts_per_tok"},
        flags={"normalize_experts": ("norm_topk_prob", False)},
    ),
)
