"""Llama in the form of Meta's own folders: params.json. Free of torch.

Names of tensors are ours, and so is the order of a head's rows. Source: meta-llama/llama-models,
models/llama3/{args,model}.py, and meta-llama/llama, llama/model.py, for Llama 2.
"""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.models.args import DecoderArgs, RopeScaling
from meshwright.models.foreign import Dimension, positive

TIED = "output.weight"
"""Written out in the files even where it is the embedding once more."""

INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads")
NUMBERS = {"norm_eps": 1e-5, "rope_theta": 10000.0}
"""Keys that older files lack, and the defaults of their model's code."""
OTHER_MODELS = ("quantization_args", "lora_args", "moe_args", "vision_model", "vision_chunk_size")
"""Keys of models that ours cannot be."""


def read_params(params: Mapping[str, Any]) -> dict[str, Dimension]:
    """Our dimensions, except the ones that only the tensors give; see `MetaForm`."""
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
        value = params.get(key, default)
        if type(value) not in (int, float):
            raise ValueError(f"{key} is {value!r}, not a number")
        found[key] = Dimension(key, float(value))
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
    if multiplier is None:
        multiplier = 1
    if type(multiplier) not in (int, float) or not 0 < multiplier < math.inf:
        raise ValueError(f"ffn_dim_multiplier is {multiplier!r}, not a positive number")
    hidden = int(multiplier * int(2 * 4 * params["dim"] / 3))
    return -(-hidden // multiple_of) * multiple_of


def same(name: str, ours: object, theirs: object) -> bool:
    """Return whether a dimension of ours agrees with params.json; see `MetaForm`."""
    if name == "rope_scaling":  # it does not say by how much: 8 times in Llama 3.1, 32 in 3.2
        return (ours is None) == (theirs is None)
    return ours == theirs


def copy_of(name: str, args: DecoderArgs) -> str | None:
    """Under which other name the files may hold the parameter once more; see `MetaForm`."""
    return TIED if args.tie_embeddings and name == "tok_embeddings.weight" else None


def is_needless(name: str) -> bool:
    """Values that follow from params.json; see `MetaForm`."""
    return name == "rope.freqs"
