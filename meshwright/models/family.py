"""All in which model families differ, one record each. Free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.models.args import DecoderArgs, RopeScaling


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter's name in the file, and its layout there."""

    name: str
    shape: tuple[int, ...]
    head_dim: int | None = None
    """If given, the rows of each head, which are so many, are for a rotation of (i, i + H/2); ours
    are for one of (2i, 2i + 1)."""
    slices: tuple[str, ...] = ()
    """If given, the files hold each slice of the first dimension under a name of its own, and
    `name` is that of none."""
    start: int = 0
    """Where its part of the second dimension begins, if the files hold it with others in one."""
    file_shape: tuple[int, ...] | None = None
    """Shape of that one tensor."""

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the files of the tensors that hold it."""
        if self.slices:
            return dict.fromkeys(self.slices, self.shape[1:])
        return {self.name: self.file_shape or self.shape}


@dataclass(frozen=True)
class Dimension:
    """One of a model's dimensions, as a file gives it."""

    key: str
    """Its name in the file."""
    value: Any


def positive(key: str, value: object) -> int:
    """Return the value of a file's key; raise `ValueError` unless it is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive integer")
    return value


def number(key: str, value: object) -> float:
    """Return the value of a file's key; raise `ValueError` unless it is a number."""
    if type(value) not in (int, float):
        raise ValueError(f"{key} is {value!r}, not a number")
    return float(value)  # type: ignore[arg-type]  # a number, as was just seen


MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Our name of a module and theirs, as most families have them; {} is the layer."""

ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")

EXPERTS = {
    "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate",
    "layers.{}.feed_forward.experts.w1": "model.layers.{}.mlp.experts.{expert}.gate_proj",
    "layers.{}.feed_forward.experts.w2": "model.layers.{}.mlp.experts.{expert}.down_proj",
    "layers.{}.feed_forward.experts.w3": "model.layers.{}.mlp.experts.{expert}.up_proj",
}
"""The same of experts in most families: {expert} is the expert's number. The files of the hub hold
one tensor for each expert."""

FUSED = {
    "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate.weight",
    "layers.{}.feed_forward.experts.w1": "model.layers.{}.mlp.experts.gate_up_proj",
    "layers.{}.feed_forward.experts.w2": "model.layers.{}.mlp.experts.down_proj",
    "layers.{}.feed_forward.experts.w3": "model.layers.{}.mlp.experts.gate_up_proj",
}
"""Names of tensors in the other layout, that of transformers 5 in memory: (E, 2 F, D), w1 above
w3, and (E, D, F)."""

TIED = "tok_embeddings.weight"
"""Our parameter that is the output projection too, where embeddings are tied."""

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

SAME = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Keys, and the keys in their place that some versions of transformers write."""

ROPE_KEYS = {"rope_type", "type", "rope_theta", *SCALING.values()}
"""Keys of those tables; others would be another rotation."""

FIXED = {"is_causal": True, "attention_chunk_size": None, "per_layer_config": None}
"""Keys that transformers reads in any family, though no config class has them, and the one value
that each can have for our models; absent, it is that (masking_utils.py, configuration_utils.py)."""

CONTEXT = "original_max_position_embeddings"
"""Such a key, or one of the rotation's table; of both, transformers takes this one if wavelengths
are stretched (modeling_rope_utils.py, `standardize_rope_params`)."""

PARTIAL = "partial_rotary_factor"
"""Such a key, or one of config.json itself, that says nothing if it is 1."""


@dataclass(frozen=True)
class HuggingFaceForm:
    """Names of a family's modules, and keys of its config.json."""

    model_type: str
    """The family's name in config.json."""
    architecture: str
    """Its class in transformers."""
    fixed: Mapping[str, object]
    """Keys of config.json that can have but one value for our model; absent, they have it."""
    modules: Mapping[str, str] = field(default_factory=lambda: MODULES)
    """Our name of a module and theirs, with names that a model may lack; {} is the layer."""
    rotated: tuple[str, ...] = ROTATED
    """Ends of the names of our modules whose rows are turned by position: transformers pairs row i
    of a head with i + H/2, Meta and we pair 2i with 2i + 1."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that are absent, where transformers has others than most families."""
    integers: Mapping[str, str] = field(default_factory=dict)
    """Our name of a dimension of the family's own, and its key."""
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """The same of a switch, and its value where the key is absent."""
    dense_layers: tuple[str, str] | None = None
    """The same of the number of layers without experts; the key lists them. We have the first."""
    stretched_rope_type: str | None = None
    """rope_type of config.json where wavelengths are stretched, as `RopeScaling` says; None: they
    never are."""

    @property
    def tied_names(self) -> tuple[str, str]:
        """Names of the embedding and of the output projection, which are one tensor if tied."""
        return f"{self.modules['tok_embeddings']}.weight", f"{self.modules['output']}.weight"

    def why_not(self, args: DecoderArgs) -> str:
        """Return why no folder can hold a model of these dimensions; "": one can."""
        for spec in args.table.mixtures.values():
            if spec.bias_std is not None or spec.activation != "swiglu":
                return f"{self.model_type} has no experts with biases or a clamped activation"
        return ""

    def tensors(self, args: DecoderArgs, *, is_fused: bool = False) -> dict[str, ForeignTensor]:
        """Return every parameter of the plain model, in its order.

        Args:
            is_fused: experts as `FUSED` has them, and not one by one.
        """
        found = {}
        for name, parameter in args.table.parameters.items():
            shape, module = parameter.shape, name.removesuffix(".weight")
            layer = module.split(".")[1] if module.startswith("layers.") else ""
            key = module.replace(f".{layer}.", ".{}.", 1) if layer else module
            theirs = self.modules[key]
            if is_fused and key in FUSED:
                found[name] = _fused(FUSED[key].format(layer), key, shape)
            elif "{expert}" in theirs:
                theirs += ".weight"
                slices = tuple(theirs.format(layer, expert=index) for index in range(shape[0]))
                found[name] = ForeignTensor(slices[0], shape, slices=slices)
            else:
                found[name] = ForeignTensor(
                    f"{theirs.format(layer)}.weight",
                    shape,
                    args.table.rope.head_dim if module.endswith(self.rotated) else None,
                )
        return found

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        """Read a config.json as the dimensions of our model, by our names; an absent key
        means transformers' default.

        Raises:
            ValueError: if our model is not that function, or a key is missing.
        """
        if config.get("model_type") != self.model_type:
            fix = "set model.name to its family, or name another folder"
            rule = f"model_type is {config.get('model_type')!r}, not {self.model_type!r}"
            raise ValueError(f"{rule}\n  fix: {fix}")
        for key, only in (FIXED | {**self.fixed}).items():
            if config.get(key, only) != only:
                raise ValueError(f"{key} is {config[key]!r}; this model has {only!r} alone")
        if config.get("quantization_config"):
            raise ValueError("quantization_config: the weights are quantized")
        if config.get(PARTIAL) not in (None, 1):
            raise ValueError(f"{PARTIAL} is {config[PARTIAL]!r}, which this model has not")
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise ValueError(f"layer_types is {kinds!r}; this model has full_attention alone")
        found = self._read_integers(config)
        # of both, transformers takes the older key
        rope_key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(rope_key) or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{rope_key} is {rope!r}, not a table")
        usual = self.defaults.get("rope_theta", 10000.0)
        theta = rope.get("rope_theta", config.get("rope_theta", usual))
        eps = config.get("rms_norm_eps", self.defaults.get("rms_norm_eps", 1e-6))
        theta_key = f"{rope_key}.rope_theta" if "rope_theta" in rope else "rope_theta"
        found["norm_eps"] = Dimension("rms_norm_eps", number("rms_norm_eps", eps))
        found["rope_theta"] = Dimension(theta_key, number(theta_key, theta))
        scaling = self._read_scaling(rope, rope_key, config)
        if self.stretched_rope_type:
            found["rope_scaling"] = Dimension(rope_key, scaling)
        for ours, (theirs, default) in self.flags.items():
            value = config.get(theirs, default)
            if type(value) is not bool:
                raise ValueError(f"{theirs} is {value!r}, not true or false")
            found[ours] = Dimension(theirs, value)
        if self.dense_layers:
            ours, theirs = self.dense_layers
            dense = config.get(theirs) or []
            if dense != [*range(len(dense))]:
                raise ValueError(f"{theirs} is {dense!r}; this model has the first layers alone")
            found[ours] = Dimension(theirs, len(dense))
        tied = config.get("tie_word_embeddings", False)
        found["tie_embeddings"] = Dimension("tie_word_embeddings", bool(tied))
        return found

    def _read_integers(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        found = {}
        for ours, theirs in {**INTEGERS, **self.integers}.items():
            usual = self.defaults.get(theirs)
            value = config.get(theirs, config.get(SAME.get(theirs, ""), usual))
            if value is None and theirs == "num_key_value_heads":
                value = config.get("num_attention_heads")
            found[ours] = Dimension(theirs, positive(theirs, value))
        head_dim = config.get("head_dim", self.defaults.get("head_dim"))
        if head_dim is None:
            head_dim = found["dim"].value // found["n_heads"].value
        found["head_dim"] = Dimension("head_dim", positive("head_dim", head_dim))
        return found

    def _read_scaling(
        self, rope: Mapping[str, Any], rope_key: str, config: Mapping[str, Any]
    ) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        stretched = self.stretched_rope_type
        if kind not in ("default", stretched) or kind is None:
            kinds = f"default and {stretched}" if stretched else "default alone"
            raise ValueError(f"{rope_key}.rope_type is {kind!r}; this model has {kinds}")
        for key, value in rope.items():
            if key not in ROPE_KEYS and value is not None and (key, value) != (PARTIAL, 1):
                raise ValueError(f"{rope_key}.{key} is {value!r}, which this model has not")
        if kind == "default":
            return None
        if CONTEXT in config and config[CONTEXT] != (inner := rope.get(CONTEXT)):
            own = f"{CONTEXT} is {config[CONTEXT]!r}"
            fix = "delete the one that the model was not trained with"
            raise ValueError(f"{own}, and {rope_key}.{CONTEXT} {inner!r}\n  fix: {fix}")
        for theirs in SCALING.values():
            number(f"{rope_key}.{theirs}", rope.get(theirs))
        return RopeScaling(**{ours: rope[theirs] for ours, theirs in SCALING.items()})

    def write_config(self, args: DecoderArgs, seq_len: int) -> dict[str, Any]:
        """config.json, in the spelling that transformers 4 and 5 both read, without the storage
        type of weights, and with no special tokens. Absent, they would be the class's own: OLMo 2's
        embedding of token 1, its padding, would get no gradient.

        Args:
            seq_len: of training; with stretched wavelengths the context is the stretched length.
        """
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.fixed,
            **{key: getattr(args, ours) for ours, key in {**INTEGERS, **self.integers}.items()},
            **{theirs: getattr(args, ours) for ours, (theirs, _) in self.flags.items()},
            "head_dim": args.table.rope.head_dim,
            "rms_norm_eps": args.norm_eps,
            "rope_theta": args.rope_theta,
            "rope_scaling": None,
            "tie_word_embeddings": args.tie_embeddings,
            "max_position_embeddings": seq_len,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        if self.dense_layers:
            ours, theirs = self.dense_layers
            config[theirs] = [*range(getattr(args, ours))]
        if scaling := args.table.rope.scaling:
            stretching = RopeScaling(*scaling)
            table = {theirs: getattr(stretching, ours) for ours, theirs in SCALING.items()}
            config["rope_scaling"] = {"rope_type": self.stretched_rope_type, **table}
            stretched = round(stretching.factor * stretching.original_seq_len)
            config["max_position_embeddings"] = max(seq_len, stretched)
        return config


def _fused(name: str, key: str, shape: tuple[int, ...]) -> ForeignTensor:
    """Return one of our parameters in the layout of `FUSED`, whose key it has there."""
    if not name.endswith("gate_up_proj"):
        return ForeignTensor(name, shape)
    experts, inner, dim = shape
    start = inner if key.endswith("w3") else 0
    return ForeignTensor(name, shape, start=start, file_shape=(experts, 2 * inner, dim))


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    """In `model.name`, and in the manifests of its checkpoints."""
    args: type[DecoderArgs]
    """Its dimensions, and how they expand to a model."""
    flavors: Mapping[str, DecoderArgs]
    """Sizes by name, a `debugmodel` for CPUs among them."""
    hf: HuggingFaceForm
    """How Hugging Face has it."""
    meta: Callable[[Mapping[str, Any]], dict[str, Dimension]] | None = None
    """Reads the params.json of Meta's folders, as far as it has our dimensions. Raises `ValueError`
    if it is of another function, or a key is missing. None: Meta has no such model."""
    torchtitan: Mapping[str, str] | None = None
    """Parts of our tensors' names, and their names in some versions of torchtitan; None: its
    checkpoints cannot be read."""
    dense: "Family | None" = None
    """Family with a feed-forward where this one has experts, and otherwise the same parameters;
    None: there is none."""
