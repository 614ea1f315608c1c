"""All in which model families differ, one record each. Free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from meshwright.models.args import DecoderArgs
from meshwright.models.config_json import (
    FULL,
    NESTED,
    PARTIAL,
    SLIDING,
    Dimension,
    FullEvery,
    number,
    positive,
    read_stretching,
    text_config,
    write_stretching,
)
from meshwright.models.parameter import Parameter


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter's name in the file, and its layout there."""

    name: str
    shape: tuple[int, ...]
    head_dim: int | None = None
    """If given, the rows of each head, which are so many, are for a rotation of (i, i + R/2); ours
    are for one of (2i, 2i + 1)."""
    rotated: int | None = None
    """R, the first rows of a head, which are rotated; None: all."""
    groups: int = 0
    """If given, the rows of a tensor of the files come in so many groups, in each of which ours
    start at `start`."""
    slices: tuple[str, ...] = ()
    """If given, the files hold each slice of the first dimension under its own name, and
    `name` is that of none."""
    start: int = 0
    """Where its part of the second dimension, or of a group, starts, if the files hold it with
    others in one."""
    step: int = 1
    """From one of its places there to the next."""
    is_transposed: bool = False
    """The files have the last dimension before the second."""
    file_shape: tuple[int, ...] | None = None
    """Shape of that one tensor."""
    copies: tuple[str, ...] = ()
    """Names of equal tensors, which files may lack."""

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the files of the tensors that hold it."""
        if self.slices:
            return dict.fromkeys(self.slices, self.shape[1:])
        return {self.name: self.file_shape or self.shape}


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
    "layers.{}.attention.sinks.weight": "model.layers.{}.self_attn.sinks",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Our name of a module and theirs, as most families have them, or of a parameter; {} is the layer.
"""

ROTATED = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")

EXPERTS = {
    "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate",
    "layers.{}.feed_forward.experts.w1": "model.layers.{}.mlp.experts.{expert}.gate_proj",
    "layers.{}.feed_forward.experts.w2": "model.layers.{}.mlp.experts.{expert}.down_proj",
    "layers.{}.feed_forward.experts.w3": "model.layers.{}.mlp.experts.{expert}.up_proj",
}
"""The same of experts in most families: {expert} is the expert's number. The files of the hub hold
one tensor for each expert."""


@dataclass(frozen=True)
class Stacked:
    """How files hold all experts of a layer in one tensor."""

    names: Mapping[str, str]
    """Names of tensors by ours; w1 and w3 are two parts of one."""
    is_interleaved: bool = False
    """Rows of w1 and w3 alternate, and matrices are transposed; otherwise w3 follows w1."""

    def tensor(self, key: str, layer: str, shape: tuple[int, ...]) -> ForeignTensor:
        """Return one of our parameters in this layout; `key` is one of `names`."""
        name, is_third = self.names[key].format(layer), key.endswith("3")
        experts, rows, *columns = shape
        is_half = "gate_up_proj" in name
        rows_there = 2 * rows if is_half else rows
        is_transposed = self.is_interleaved and bool(columns)
        dimensions = (*columns, rows_there) if is_transposed else (rows_there, *columns)
        return ForeignTensor(
            name,
            shape,
            start=(1 if self.is_interleaved else rows) if is_third else 0,
            step=2 if is_half and self.is_interleaved else 1,
            is_transposed=is_transposed,
            file_shape=(experts, *dimensions),
        )


@dataclass(frozen=True)
class Joined:
    """How files hold several of our parameters of a layer in one tensor: some rows of each, group
    by group."""

    name: str
    """There, with {} for the layer."""
    parts: tuple[str, ...]
    """Names of ours, in the order of their rows."""
    groups: str | None = None
    """Name of the dimension that is the number of groups; None: there is one."""
    is_filter: bool = False
    """It has a dimension of one more, the second."""

    def tensors(
        self, layer: str, args: DecoderArgs, table: Mapping[str, Parameter]
    ) -> dict[str, tuple[str, int, int, tuple[int, ...]]]:
        """Return name there, groups, start and shape there of each part that the layer has, by our
        name."""
        names = [f"layers.{layer}.{part}" for part in self.parts]
        if names[0] not in table:
            return {}
        groups = getattr(args, self.groups) if self.groups else 1
        rows = [table[name].shape[0] // groups for name in names]
        columns = table[names[0]].shape[1:]
        shape = (groups * sum(rows), *((1,) if self.is_filter else ()), *columns)
        starts = [sum(rows[:index]) for index in range(len(rows))]
        there = self.name.format(layer)
        return {n: (there, groups, at, shape) for n, at in zip(names, starts, strict=True)}


FUSED = Stacked(
    {
        "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate.weight",
        "layers.{}.feed_forward.experts.w1": "model.layers.{}.mlp.experts.gate_up_proj",
        "layers.{}.feed_forward.experts.w2": "model.layers.{}.mlp.experts.down_proj",
        "layers.{}.feed_forward.experts.w3": "model.layers.{}.mlp.experts.gate_up_proj",
    }
)
"""The layout of most families that transformers 5 has in memory: (E, 2 F, D) and (E, D, F)."""

PREDICTORS = {
    "layers.{}.enorm": "model.layers.{}.enorm",
    "layers.{}.hnorm": "model.layers.{}.hnorm",
    "layers.{}.eh_proj": "model.layers.{}.eh_proj",
    "layers.{}.head_norm": "model.layers.{}.shared_head.norm",
}
"""Names of the modules of an MTP layer in DeepSeek's files, by ours."""

COPIES = {
    "tok_embeddings.weight": "model.layers.{}.embed_tokens.weight",
    "output.weight": "model.layers.{}.shared_head.head.weight",
}
"""Our name of a parameter, and the name of the copy that each layer of MTP has in the files."""

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

SAME = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Keys, and the keys in their place that some versions of transformers write."""

FIXED = {"is_causal": True, "attention_chunk_size": None, "per_layer_config": None}
"""Keys that transformers reads in any family, though no config class has them, and the one value
that each can have for our models; absent, it is that (masking_utils.py, configuration_utils.py)."""

VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.visual.",
)
"""Beginnings of the names of what sees images, in files of models that nest a text model."""


@dataclass(frozen=True)
class HuggingFaceForm:
    """Names of a family's modules, and keys of its config.json."""

    model_type: str
    """The family's name in config.json."""
    architecture: str
    """Its class in transformers."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of config.json that can have but one value for our model; absent, they have it."""
    aliases: tuple[str, ...] = ()
    """Further names of it in config.json, which files of the same model have; none is written."""
    nested_in: str | None = None
    """The model_type of files that hold such a model next to a vision tower; they are read, and
    never written."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Our name of a tensor that is no parameter, and theirs; {} is the layer. Files have it in
    fp32, as we do, whatever the type of weights."""
    predictors: str | None = None
    """Key of the number of layers that follow the last one and predict further tokens (MTP), which
    are `mtp_depth` of ours, or left out. None: files have none."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are no part of our model."""
    modules: Mapping[str, str] = field(default_factory=lambda: MODULES)
    """Our name of a module and theirs, with names that a model may lack; {} is the layer."""
    linear_modules: Mapping[str, str] = field(default_factory=dict)
    """The same of modules whose names differ in layers with linear attention."""
    rotated: tuple[str, ...] = ROTATED
    """Ends of the names of our modules whose rows are turned by position: transformers pairs row i
    of a head with i + H/2, Meta and we pair 2i with 2i + 1."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that are absent, where transformers has others than most families."""
    integers: Mapping[str, str] = field(default_factory=dict)
    """Our name of a dimension of the family's own, and its key."""
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """The same of a factor, and its value where the key is absent."""
    caps: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    """The same of a soft cap, which may be null as well."""
    read_own: Callable[[Mapping[str, Any]], dict[str, Dimension]] | None = None
    """Reads the dimensions that no field above can say. Raises `ValueError` if our model hasn't
    what a key says."""
    write_own: Callable[[Any], dict[str, Any]] | None = None
    """Returns their keys, from the family's args."""
    stacked: Stacked = FUSED
    """How files hold experts that have no names in `modules`, or that an export is to
    stack."""
    joined: tuple[Joined, ...] = ()
    """Tensors of the files that are several of ours."""
    partial_rotary: float | None = None
    """partial_rotary_factor where the key is absent; None: heads are rotated whole."""
    rotates: str | None = None
    """Our name of a switch, off where rope_theta is null: softmax attention knows no positions."""
    ignored_rope_keys: tuple[str, ...] = ()
    """Keys of the rotation's table that say nothing of text."""
    quantizations: tuple[str, ...] = ()
    """quant_methods in config.json that are read."""
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    """The rotation's table where config.json has none."""
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """The same of a switch, and its value where the key is absent."""
    dense_layers: tuple[str, str] | None = None
    """The same of the number of layers without experts; the key lists them. We have the first."""
    stretched_rope_type: str | None = None
    """rope_type of config.json where wavelengths are stretched, a key in `config_json.KINDS`; None:
    they never are."""
    windows: FullEvery | None = None
    """The keys of layers with windows or linear attention; None: all layers are full."""
    nests_rope: bool = False
    """The rotation has a table for each kind of layer."""
    local_theta: tuple[str, float] | None = None
    """Of layers with windows, the older key of `local_theta`, and its value where no key says it;
    None: they have the theta of full layers."""

    @property
    def model_types(self) -> tuple[str | None, ...]:
        """Values of config.json's model_type with which files are read."""
        return (self.model_type, *self.aliases, self.nested_in)

    @property
    def tied_names(self) -> tuple[str, str]:
        """Names of the embedding and of the output projection, which are one tensor if tied."""
        return f"{self.modules['tok_embeddings']}.weight", f"{self.modules['output']}.weight"

    def why_not(self, args: DecoderArgs) -> str:
        """Return why no folder can hold a model of these dimensions; "": one can."""
        if args.tie_embeddings and args.folded_factors:
            return "its embedding is the output as well, so muP's factor on logits fits in neither"
        if args.mtp_depth and self.predictors is None:
            return f"{self.model_type} has no layers for MTP (model.args.mtp_depth)"
        has_biases = "layers.{}.feed_forward.experts.b1" in self.stacked.names
        for spec in [] if has_biases else args.table.mixtures.values():
            if spec.bias_std is not None or spec.activation != "swiglu":
                return f"{self.model_type} has no experts with biases or a clamped activation"
        for name, tensor in self.tensors(args).items():
            if tensor.name.startswith("."):
                return f"{self.model_type} has no name for {name}: add one to its `modules`"
        return ""

    def tensors(self, args: DecoderArgs, *, is_fused: bool = False) -> dict[str, ForeignTensor]:
        """Return every parameter of the plain model, in its order, and the state in the files.

        Args:
            is_fused: experts as `FUSED` has them, and not one by one.
        """
        found = {}
        table, layers = args.table.parameters, map(str, range(args.n_layers))
        joined = {
            name: place
            for layer, each in product(layers, self.joined)
            for name, place in each.tensors(layer, args, table).items()
        }
        for name, parameter in table.items():
            kind = "bias" if name.endswith(".bias") else "weight"
            shape, module = parameter.shape, name.removesuffix(f".{kind}")
            layer = module.split(".")[1] if module.startswith("layers.") else ""
            key = module.replace(f".{layer}.", ".{}.", 1) if layer else module
            modules = self.modules
            if layer and int(layer) not in args.table.attentions:
                modules = {**modules, **self.linear_modules}
            theirs, exact = modules.get(key, ""), modules.get(f"{key}.{kind}")
            if key in self.stacked.names and (is_fused or not theirs):
                found[name] = self.stacked.tensor(key, layer, shape)
            elif "{expert}" in theirs:
                theirs += ".weight"
                slices = tuple(theirs.format(layer, expert=index) for index in range(shape[0]))
                found[name] = ForeignTensor(slices[0], shape, slices=slices)
            else:
                head_dim, rotated = None, None
                if module.endswith(self.rotated):
                    head_dim = args.table.head_dim
                    rotated = args.table.ropes[0].head_dim if self.partial_rotary else None
                place: dict[str, Any] = {"copies": self._copies(name, args)}
                there = (exact or f"{theirs}.{kind}").format(layer)
                if name in joined:
                    there, groups, start, file_shape = joined[name]
                    place |= {"groups": groups, "start": start, "file_shape": file_shape}
                found[name] = ForeignTensor(there, shape, head_dim, rotated, **place)
        for name, state in args.table.state.items():
            layer = name.split(".")[1]
            if theirs := self.state.get(name.replace(f".{layer}.", ".{}.", 1), ""):
                found[name] = ForeignTensor(theirs.format(layer), state.shape)
        return found

    def _copies(self, name: str, args: DecoderArgs) -> tuple[str, ...]:
        is_both = name == TIED and args.tie_embeddings
        theirs = [*COPIES.values()] if is_both else [COPIES[name]] if name in COPIES else []
        return tuple(one.format(layer) for layer in args.table.predictors for one in theirs)

    def is_of_predictor(self, name: str, args: DecoderArgs) -> bool:
        """Return whether a tensor of the files belongs to a layer after the last one of `args`."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        return self.predictors is not None and layer.isdecimal() and int(layer) >= args.n_layers

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        """Read a config.json as the dimensions of our model, by our names; an absent key
        means transformers' default.

        Raises:
            ValueError: if our model isn't that function, or a key is missing.
        """
        self._check_model_type(config)
        config = text_config(config)
        for key, only in (FIXED | {**self.fixed}).items():
            if config.get(key, only) != only:
                raise ValueError(f"{key} is {config[key]!r}; this model has {only!r} only")
        quantized = config.get("quantization_config") or {}
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        if quantized and method not in self.quantizations:
            known = ", ".join([*self.quantizations, "weights that are not quantized"])
            raise ValueError(f"quantization_config: quant_method is {method!r}; can read {known}")
        if self.partial_rotary is None and config.get(PARTIAL) not in (None, 1):
            raise ValueError(f"{PARTIAL} is {config[PARTIAL]!r}, which this model has not")
        found = self._read_integers(config)
        if self.windows:
            found |= self.windows.read(config, found["n_layers"].value)
        else:
            kinds = config.get("layer_types") or []
            if not isinstance(kinds, list) or any(kind != FULL for kind in kinds):
                raise ValueError(f"layer_types is {kinds!r}; this model has {FULL} only")
        found |= self._read_ropes(config) if self.nests_rope else self._read_rope(config)
        eps = config.get("rms_norm_eps", self.defaults.get("rms_norm_eps", 1e-6))
        found["norm_eps"] = Dimension("rms_norm_eps", number("rms_norm_eps", eps))
        for ours, (theirs, factor) in self.numbers.items():
            found[ours] = Dimension(theirs, number(theirs, config.get(theirs, factor)))
        for ours, (theirs, cap) in self.caps.items():
            value = config.get(theirs, cap)
            found[ours] = Dimension(theirs, None if value is None else number(theirs, value))
        if self.read_own is not None:
            found |= self.read_own(config)
        for ours, (theirs, default) in self.flags.items():
            value = config.get(theirs, default)
            if type(value) is not bool:
                raise ValueError(f"{theirs} is {value!r}, not true or false")
            found[ours] = Dimension(theirs, value)
        if self.dense_layers:
            ours, theirs = self.dense_layers
            dense = config.get(theirs) or []
            if dense != [*range(len(dense))]:
                raise ValueError(f"{theirs} is {dense!r}; this model has the first layers only")
            found[ours] = Dimension(theirs, len(dense))
        tied = config.get("tie_word_embeddings", self.defaults.get("tie_word_embeddings", False))
        found["tie_embeddings"] = Dimension("tie_word_embeddings", bool(tied))
        return found

    def _check_model_type(self, config: Mapping[str, Any]) -> None:
        found, where = config.get("model_type"), "model_type"
        if found is not None and found == self.nested_in:
            found = text_config(config).get("model_type", self.model_type)
            where = f"{NESTED}.model_type"
        if found not in (self.model_type, *self.aliases):
            fix = "set model.name to its family, or choose a different folder"
            raise ValueError(f"{where} is {found!r}, not {self.model_type!r}\n  fix: {fix}")

    def _read_integers(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        found = dict[str, Dimension]()
        for ours, theirs in {**INTEGERS, **self.integers}.items():
            usual = self.defaults.get(theirs)
            value = config.get(theirs, config.get(SAME.get(theirs, ""), usual))
            if value is None and theirs == "num_key_value_heads":
                value = found["n_heads"].value
            found[ours] = Dimension(theirs, positive(theirs, value))
        head_dim = config.get("head_dim", self.defaults.get("head_dim"))
        if head_dim is None:
            head_dim = found["dim"].value // found["n_heads"].value
        found["head_dim"] = Dimension("head_dim", positive("head_dim", head_dim))
        return found

    def _read_rope(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        """Read the rotation. Of the two tables that may hold it, transformers takes the older."""
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(key)
        rope = self.default_rope if rope is None else rope
        if not isinstance(rope, Mapping):
            raise ValueError(f"{key} is {rope!r}, not a table")
        theta = rope.get("rope_theta", config.get("rope_theta", self._usual_theta))
        theta_key = f"{key}.rope_theta" if "rope_theta" in rope else "rope_theta"
        found = dict[str, Dimension]()
        if self.rotates is not None:
            found[self.rotates] = Dimension(theta_key, theta is not None)
            theta = self._usual_theta if theta is None else theta
        found["rope_theta"] = Dimension(theta_key, number(theta_key, theta))
        ignored = self.ignored_rope_keys
        if self.partial_rotary is not None:
            share = rope.get(PARTIAL, config.get(PARTIAL, self.partial_rotary))
            found[PARTIAL] = Dimension(PARTIAL, number(PARTIAL, share))
            ignored = (*ignored, PARTIAL)
        rope = {name: value for name, value in rope.items() if name not in ignored}
        scaling = read_stretching(rope, key, self.stretched_rope_type, config)
        if self.stretched_rope_type:
            found["rope_scaling"] = Dimension(key, scaling)
        return found

    def _read_ropes(self, config: Mapping[str, Any]) -> dict[str, Dimension]:
        """Read the rotations of a family whose config.json has one for each kind of layer.

        transformers updates that of full layers with the older table, and gives the older theta to
        them only (configuration_olmo3.py and configuration_gemma3.py, 5.24).
        """
        tables = config.get("rope_parameters") or {}
        older = config.get("rope_scaling") or {}
        is_nested = isinstance(tables, Mapping) and {*tables} <= {FULL, SLIDING}
        if not is_nested or not all(isinstance(t or {}, Mapping) for t in tables.values()):
            rule = f"not a table for each of {FULL} and {SLIDING}"
            raise ValueError(f"rope_parameters is {tables!r}, {rule}")
        if not isinstance(older, Mapping):
            raise ValueError(f"rope_scaling is {older!r}, not a table")
        full, sliding = {**(tables.get(FULL) or {}), **older}, tables.get(SLIDING) or {}
        full_key, sliding_key = f"rope_parameters.{FULL}", f"rope_parameters.{SLIDING}"
        theta = full.get("rope_theta", config.get("rope_theta", self._usual_theta))
        local = self._usual_theta
        if self.local_theta:
            older_key, usual = self.local_theta
            local = config.get(older_key, usual)
        local = sliding.get("rope_theta", local)
        theta, local = (number("rope_theta", value) for value in (theta, local))
        found = {"rope_theta": Dimension(f"{full_key}.rope_theta", theta)}
        if self.local_theta:
            found["local_theta"] = Dimension(f"{sliding_key}.rope_theta", local)
        elif theta != local:
            rule = f"{theta} in full layers and {local} in others; this model has one for all"
            raise ValueError(f"rope_theta is {rule}")
        if full.get("truncate") is False:
            raise ValueError(f"{full_key}.truncate is False, which transformers reads as true")
        read_stretching(sliding, sliding_key, None, config)
        scaling = read_stretching(full, full_key, self.stretched_rope_type, config)
        if self.stretched_rope_type:
            found["rope_scaling"] = Dimension(full_key, scaling)
        return found

    @property
    def _usual_theta(self) -> object:
        return self.defaults.get("rope_theta", 10000.0)

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
            **{
                theirs: getattr(args, ours)
                for ours, (theirs, _) in {**self.flags, **self.numbers, **self.caps}.items()
            },
            "head_dim": args.table.head_dim,
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
        if self.predictors:
            config[self.predictors] = args.mtp_depth
        if self.dense_layers:
            ours, theirs = self.dense_layers
            config[theirs] = [*range(getattr(args, ours))]
        if stretching := getattr(args, "rope_scaling", None):
            config["rope_scaling"] = write_stretching(stretching)
            # a linear one has no original context
            original = getattr(stretching, "original_seq_len", 0)
            config["max_position_embeddings"] = max(seq_len, round(stretching.factor * original))
        elif self.default_rope:  # without a table, transformers takes that
            rope = {"rope_type": "default", "rope_theta": args.rope_theta}
            config["rope_parameters"] = rope
        if self.windows:
            config |= self.windows.write(args)
        if self.partial_rotary is not None:
            config[PARTIAL] = getattr(args, PARTIAL)
        if self.nests_rope:
            config |= self._write_ropes(args, config["rope_scaling"])
        if self.write_own is not None:
            config |= self.write_own(args)
        return config

    def _write_ropes(
        self, args: DecoderArgs, stretching: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the keys of a family with a rotation for each kind of layer."""
        theta = getattr(args, "local_theta", args.rope_theta)
        full = {"rope_type": "default", "rope_theta": args.rope_theta, **(stretching or {})}
        sliding = {"rope_type": "default", "rope_theta": theta}
        older = {self.local_theta[0]: theta} if self.local_theta else {}
        return older | {"rope_parameters": {FULL: full, SLIDING: sliding}}


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
    dense: "Family | None" = None
    """Family with a feed-forward where this one has experts, and otherwise the same parameters;
    None: there is none."""
