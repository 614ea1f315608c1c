"""gpt-oss as data. Free of torch.

Source: OpenAI 2025, arXiv:2508.10925; dimensions come from the config.json of openai/gpt-oss-20b
and openai/gpt-oss-120b.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.models.args import STD, ExpertArgs, WindowArgs
from meshwright.models.config_json import CONTEXT, Windows
from meshwright.models.family import MODULES, Family, HuggingFaceForm, Stacked
from meshwright.models.rope_scaling import Yarn
from meshwright.models.table import AttentionSpec, DecoderSpec, MixtureSpec

YARN = Yarn(factor=32.0, original_seq_len=4096, truncate=False)


@dataclass(frozen=True)
class GptOssArgs(WindowArgs, ExpertArgs):
    """Dimensions of a gpt-oss; `hidden_dim` is the FFN size of an expert."""

    rope_theta: float = 150000.0
    rope_scaling: Yarn | None = YARN
    """Of all layers; None: they aren't stretched."""
    window: int = 128
    full_every: int = 2
    n_experts: int = 32
    n_active: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.normalize_experts:
            raise ValueError(
                "normalize_experts = false: the weights of a gpt-oss's experts add up to one: "
                "leave it out"
            )

    def expand(self) -> DecoderSpec:
        """All matrices and sinks start with the same deviation, biases at zero (transformers)."""
        return self.decoder(rope_scaling=self.rope_scaling)

    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        biases = ("wq", "wk", "wv", "wo")
        return super().attention_layers(replace(attention, biases=biases, sink_std=STD))

    def expert_layers(self, out_std: float) -> Sequence[MixtureSpec | None]:
        options = {"activation": "clamped_swiglu", "bias_std": 0.0}
        return [self.mixture(self.hidden_dim, out_std, **options)] * self.n_layers


FLAVORS: dict[str, GptOssArgs] = {
    "debugmodel": GptOssArgs(256, 6, 8, 4, 192, 2048, head_dim=48, window=64, n_experts=16),
    "gpt_oss_20b": GptOssArgs(2880, 24, 64, 8, 2880, 201088, head_dim=64),
    "gpt_oss_120b": GptOssArgs(2880, 36, 64, 8, 2880, 201088, head_dim=64, n_experts=128),
}

OURS, THEIRS = "layers.{}.feed_forward.experts", "model.layers.{}.mlp.experts"

EXPERTS = {
    "w1": "gate_up_proj",
    "w2": "down_proj",
    "w3": "gate_up_proj",
    "b1": "gate_up_proj_bias",
    "b2": "down_proj_bias",
    "b3": "gate_up_proj_bias",
}

FAMILY = Family(
    name="gpt_oss",
    args=GptOssArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        modules={**MODULES, "layers.{}.feed_forward.router": "model.layers.{}.mlp.router"},
        fixed={
            "hidden_act": "silu",
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "head_dim": 64,
            "num_key_value_heads": 8,
        },
        integers={"n_experts": "num_local_experts", "n_active": "num_experts_per_tok"},
        stretched_rope_type="yarn",
        default_rope={
            "rope_type": "yarn",
            "factor": YARN.factor,
            CONTEXT: YARN.original_seq_len,
            "truncate": YARN.truncate,
        },
        windows=Windows(128, every=2),
        stacked=Stacked(
            {f"{OURS}.{name}": f"{THEIRS}.{theirs}" for name, theirs in EXPERTS.items()},
            is_interleaved=True,
        ),
        quantizations=("mxfp4",),
    ),
)
