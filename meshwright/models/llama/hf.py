"""Llama in the form of Hugging Face's transformers: names, and config.json. Free of torch."""

from collections.abc import Mapping
from typing import Any

from meshwright.models.foreign import Dimension, ForeignTensor
from meshwright.models.llama import LlamaArgs, RopeScaling

MODEL_TYPE = "llama"

MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Our name of a module and theirs; {} is the layer."""

ROTATED = ("attention.wq", "attention.wk")
"""Modules whose rows are turned by position: transformers pairs row i of a head with i + H/2, Meta
and we pair 2i with 2i + 1."""

TIED = "tok_embeddings.weight"
"""Our parameter that is the output projection too, where embeddings are tied."""

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys of config.json that can have but one value for our model; absent, they have it."""

INTEGERS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
"""Fields of `RopeScaling`, and the keys of rope_scaling or rope_parameters."""


def tensors(args: LlamaArgs) -> dict[str, ForeignTensor]:
    """Every parameter of the plain model, in its order; see `HuggingFaceForm`."""
    found = {}
    for name, shape in args.parameter_shapes().items():
        module = name.removesuffix(".weight")
        layer = module.split(".")[1] if module.startswith("layers.") else ""
        theirs = MODULES[module.replace(f".{layer}.", ".{}.", 1) if layer else module]
        found[name] = ForeignTensor(
            f"{theirs.format(layer)}.weight",
            shape,
            args.head_dim if module.endswith(ROTATED) else None,
            (f"{MODULES['output']}.weight",) if name == TIED and args.tie_embeddings else (),
        )
    return found


def is_needless(name: str, args: LlamaArgs) -> bool:
    """What old files hold that follows from config.json; see `HuggingFaceForm`."""
    return name.endswith("rotary_emb.inv_freq")


def read_config(config: Mapping[str, Any]) -> dict[str, Dimension]:
    """Our dimensions; what a key that is absent means is transformers' default, for the keys that
    were not always written. See `HuggingFaceForm`."""
    if config.get("model_type") != MODEL_TYPE:
        raise ValueError(f"model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}")
    for key, only in FIXED.items():
        if config.get(key, only) != only:
            raise ValueError(f"{key} is {config[key]!r}; this model has {only!r} alone")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: the weights are quantized")
    found = {}
    for ours, theirs in INTEGERS.items():
        value = config.get(theirs)
        if value is None and theirs == "num_key_value_heads":
            value = config.get("num_attention_heads")
        if type(value) is not int or value < 1:
            raise ValueError(f"{theirs} is {value!r}, not a positive integer")
        found[ours] = Dimension(theirs, value)
    heads = found["n_heads"].value
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim * heads != found["dim"].value:
        raise ValueError(
            f"head_dim is {head_dim!r}; this model has hidden_size / num_attention_heads = "
            f"{found['dim'].value / heads:g} alone"
        )
    rope, rope_key = config.get("rope_parameters"), "rope_parameters"
    if rope is None:
        rope, rope_key = config.get("rope_scaling"), "rope_scaling"
    rope = rope or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{rope_key} is {rope!r}, not a table")
    theta_key = "rope_parameters.rope_theta" if "rope_theta" in rope else "rope_theta"
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    numbers = {
        "norm_eps": Dimension("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        "rope_theta": Dimension(theta_key, theta),
    }
    for name, dimension in numbers.items():
        if type(dimension.value) not in (int, float):
            raise ValueError(f"{dimension.key} is {dimension.value!r}, not a number")
        found[name] = Dimension(dimension.key, float(dimension.value))
    found["rope_scaling"] = Dimension(rope_key, _read_scaling(rope, rope_key))
    tied = config.get("tie_word_embeddings", False)
    found["tie_embeddings"] = Dimension("tie_word_embeddings", bool(tied))
    return found


def _read_scaling(rope: Mapping[str, Any], rope_key: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{rope_key}.rope_type is {kind!r}; this model has default and llama3")
    values = {ours: rope.get(theirs) for ours, theirs in SCALING.items()}
    for ours, value in values.items():
        if type(value) not in (int, float):
            raise ValueError(f"{rope_key}.{SCALING[ours]} is {value!r}, not a number")
    return RopeScaling(**values)  # type: ignore[arg-type]  # numbers, as was just seen


def write_config(args: LlamaArgs, seq_len: int) -> dict[str, Any]:
    """In the spelling that transformers 4 and 5 both read; see `HuggingFaceForm`.

    Args:
        seq_len: of training; with stretched wavelengths the context is what they were stretched to.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        **FIXED,
        **{theirs: getattr(args, ours) for ours, theirs in INTEGERS.items()},
        "head_dim": args.head_dim,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": args.tie_embeddings,
        "max_position_embeddings": seq_len,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if scaling := args.rope_scaling:
        table = {theirs: getattr(scaling, ours) for ours, theirs in SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3", **table}
        stretched = round(scaling.factor * scaling.original_seq_len)
        config["max_position_embeddings"] = max(seq_len, stretched)
    return config
