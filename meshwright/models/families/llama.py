"""Llama 2 and 3, as data. Free of torch, so that a config is checked before torch is loaded.

Source: Touvron et al. 2023, arXiv:2307.09288; Llama Team 2024, arXiv:2407.21783.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.args import STD, DecoderArgs
from meshwright.models.config_json import Dimension, number, positive
from meshwright.models.family import Family, HuggingFaceForm
from meshwright.models.rope_scaling import RopeScaling
from meshwright.models.table import DecoderSpec

INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads")

NUMBERS = {"norm_eps": 1e-5, "rope_theta": 10000.0}
"""Keys that older files lack, and the defaults of their model's code."""

OTHER_MODELS = ("quantization_args", "lora_args", "moe_args", "vision_model", "vision_chunk_size")
"""Keys of models that ours cannot be."""


def read_params(params: Mapping[str, Any]) -> dict[str, Dimension]:
    """Return our dimensions, except the ones that only the tensors give; see `Family.meta`."""
    for key in OTHER_MODELS:
        if params.get(key) not in (None, -1):
            raise ValueError(f"{key} is {params[key]!r}: it is of another kind of model")
    found = {}
    for key in INTEGERS:
        value = params.get(key)
        if value is None and key == "n_kv_heads":
            value = params.get("n_heads")
        found[key] = Dimension(key, positive(key, value))
    width = found["dim"].value // found["n_heads"].value
    found["head_dim"] = Dimension("heads of width dim / n_heads, which", width)
    vocab_size = params.get("vocab_size", -1)
    if vocab_size != -1:  # which is for the tokenizer to say
        found["vocab_size"] = Dimension("vocab_size", positive("vocab_size", vocab_size))
    for key, default in NUMBERS.items():
        found[key] = Dimension(key, number(key, params.get(key, default)))
    found["hidden_dim"] = Dimension(
        "a feed-forward width, by dim, multiple_of and ffn_dim_multiplier,", _hidden_dim(params)
    )
    scaling = RopeScaling() if params.get("use_scaled_rope") else None
    found["rope_scaling"] = Dimension("use_scaled_rope, which in Llama 3.1", scaling)
    return found


def _hidden_dim(params: Mapping[str, Any]) -> int:
    """Two thirds of 4 D, times the multiplier, up to the next multiple; truncated at each step."""
    multiple_of = positive("multiple_of", params.get("multiple_of", 256))
    multiplier = params.get("ffn_dim_multiplier")
    multiplier = number("ffn_dim_multiplier", 1 if multiplier is None else multiplier)
    if not 0 < multiplier < math.inf:
        raise ValueError(f"ffn_dim_multiplier is {multiplier!r}, not a positive number")
    hidden = int(multiplier * int(2 * 4 * params["dim"] / 3))
    return -(-hidden // multiple_of) * multiple_of


TORCHTITAN = {
    "attention.wq.": "attention.qkv_linear.wq.",
    "attention.wk.": "attention.qkv_linear.wk.",
    "attention.wv.": "attention.qkv_linear.wv.",
    "output.": "lm_head.",
}
"""Parts of our names, and their names from its version 0.3 on."""


@dataclass(frozen=True)
class LlamaArgs(DecoderArgs):
    """Dimensions of a Llama."""

    rope_scaling: RopeScaling | None = None

    def expand(self) -> DecoderSpec:
        """Matrices that end on the residual stream start smaller the more layers there are, so that
        its variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). The output
        projection starts so that logits have variance 1 at any width."""
        return self.decoder(
            out_std=STD / math.sqrt(2 * self.n_layers),
            output_std=1 / math.sqrt(self.dim),
            rope_scaling=self.rope_scaling,
        )


def _llama2(dim: int, layers: int, heads: int, kv_heads: int, hidden: int) -> LlamaArgs:
    return LlamaArgs(dim, layers, heads, kv_heads, hidden, vocab_size=32000, rope_theta=10000.0)


def _llama3(
    dim: int, layers: int, heads: int, hidden: int, stretch: float | None, tied: bool = False
) -> LlamaArgs:
    scaling = RopeScaling(factor=stretch) if stretch else None
    return LlamaArgs(
        dim, layers, heads, 8, hidden, 128256, rope_scaling=scaling, tie_embeddings=tied
    )


FLAVORS: dict[str, LlamaArgs] = {
    "debugmodel": LlamaArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048
    ),
    "llama2_7b": _llama2(4096, 32, 32, 32, 11008),
    "llama2_13b": _llama2(5120, 40, 40, 40, 13824),
    "llama2_70b": _llama2(8192, 80, 64, 8, 28672),
    "llama3_1b": _llama3(2048, 16, 32, 8192, stretch=32.0, tied=True),  # Llama 3.2 1B
    "llama3_3b": _llama3(3072, 28, 24, 8192, stretch=32.0, tied=True),  # Llama 3.2 3B
    "llama3_8b": _llama3(4096, 32, 32, 14336, stretch=None),  # Llama 3 8B
    "llama3.1_8b": _llama3(4096, 32, 32, 14336, stretch=8.0),
    "llama3_70b": _llama3(8192, 80, 64, 28672, stretch=None),  # Llama 3 70B
    "llama3.1_70b": _llama3(8192, 80, 64, 28672, stretch=8.0),
    "llama3.1_405b": _llama3(16384, 126, 128, 53248, stretch=8.0),
}

FAMILY = Family(
    name="llama",
    args=LlamaArgs,
    flavors=FLAVORS,
    hf=HuggingFaceForm(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        defaults={"rms_norm_eps": 1e-6},
        stretched_rope_type="llama3",
    ),
    meta=read_params,
    torchtitan=TORCHTITAN,
)
