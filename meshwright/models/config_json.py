"""Values of Hugging Face's config.json, and its tables of rotary positions. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshwright.models.rope_scaling import LinearScaling, RopeScaling, Stretching, Yarn


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


CONTEXT = "original_max_position_embeddings"
"""A key that transformers reads in any family, or one of the rotation's table; of both, it takes
the outer one if wavelengths are stretched (modeling_rope_utils.py, `standardize_rope_params`)."""

PARTIAL = "partial_rotary_factor"
"""Such a key, or one of config.json itself, that says nothing if it is 1."""

KINDS: Mapping[str, type[Stretching]] = {
    "llama3": RopeScaling,
    "linear": LinearScaling,
    "yarn": Yarn,
}
"""By rope_type."""

OPTIONAL = (
    *("beta_fast", "beta_slow", "attention_factor"),
    *("truncate", "mscale", "mscale_all_dim"),
)
"""Keys that a table may lack; then they are as if a TOML lacked them."""


def keys_of(kind: type[Stretching]) -> dict[str, str]:
    """Return our names of what the rotation's table says, and its keys."""
    names = [field.name for field in fields(kind)]
    return {name: CONTEXT if name == "original_seq_len" else name for name in names}


def read_stretching(
    rope: Mapping[str, Any], where: str, kind: str | None, config: Mapping[str, Any]
) -> Stretching | None:
    """Read how a table of the rotation stretches wavelengths.

    Args:
        where: the table's key.
        kind: the only rope_type, besides "default", that the family has; None: there is none.
        config: the file.

    Raises:
        ValueError: if that is a different rotation than ours.
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", kind) or rope_type is None:
        kinds = f"default and {kind}" if kind else "default only"
        raise ValueError(f"{where}.rope_type is {rope_type!r}; this model has {kinds}")
    keys = keys_of(KINDS[kind]) if kind else {}
    known = {"rope_type", "type", "rope_theta", *keys.values(), *keys_of(RopeScaling).values()}
    for key, value in rope.items():
        if key not in known and value is not None and (key, value) != (PARTIAL, 1):
            raise ValueError(f"{where}.{key} is {value!r}, which this model has not")
    if rope_type == "default":
        return None
    if CONTEXT in keys.values() and CONTEXT in config and config[CONTEXT] != rope.get(CONTEXT):
        own = f"{CONTEXT} is {config[CONTEXT]!r}"
        fix = "delete the one that the model was not trained with"
        raise ValueError(f"{own}, and {where}.{CONTEXT} {rope.get(CONTEXT)!r}\n  fix: {fix}")
    values = dict[str, Any]()
    for ours, theirs in keys.items():
        value = rope.get(theirs)
        if value is None and theirs in OPTIONAL:
            continue
        if theirs != "truncate":
            number(f"{where}.{theirs}", value)
        elif type(value) is not bool:
            raise ValueError(f"{where}.{theirs} is {value!r}, not true or false")
        values[ours] = value
    return KINDS[rope_type](**values)


def write_stretching(stretching: Stretching) -> dict[str, Any]:
    """Return the table of the rotation, without its theta."""
    kind = next(name for name, known in KINDS.items() if isinstance(stretching, known))
    keys = keys_of(type(stretching))
    table = {theirs: getattr(stretching, ours) for ours, theirs in keys.items()}
    return {"rope_type": kind, **{key: value for key, value in table.items() if value is not None}}


NESTED, AROUND = "text_config", ("quantization_config", "tie_word_embeddings", "eos_token_id")
"""Key of the text model's own table, in files of a model that sees images too, and keys of the
outer table that hold for the text model unless its own has them."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a config.json's text model: of the table that nests them, if there is one.

    Raises:
        ValueError: if that is no table.
    """
    if NESTED not in config:
        return config
    if not isinstance(config[NESTED], Mapping):
        raise ValueError(f"{NESTED} is {config[NESTED]!r}, not a table")
    return {key: config[key] for key in AROUND if key in config} | {**config[NESTED]}


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers in layer_types, and keys of rope_parameters where each has its own table."""


@dataclass(frozen=True, kw_only=True)
class FullEvery:
    """The keys of a family of whose layers every k-th is full."""

    every: int
    """k, where no key says which layers are full."""
    pattern: str | None = None
    """Key of k in older files; None: there is none."""
    kind: str = LINEAR
    """Of the other layers."""

    def read(self, config: Mapping[str, Any], num_layers: int) -> dict[str, Dimension]:
        """Read `full_every` of `FullEveryArgs`.

        Raises:
            ValueError: if layers are others than every k-th full.
        """
        key, every = "layer_types", self.every
        if self.pattern and config.get(self.pattern) is not None:
            key, every = self.pattern, positive(self.pattern, config[self.pattern])
        kinds = config.get("layer_types")
        if kinds is not None:
            key = "layer_types"
            if not isinstance(kinds, list):
                raise ValueError(f"layer_types is {kinds!r}, not a list")
            every = kinds.index(FULL) + 1 if FULL in kinds else num_layers + 1
            if kinds != [FULL if (i + 1) % every == 0 else self.kind for i in range(num_layers)]:
                rule = f"this model has {self.kind}, and {FULL} in every k-th layer"
                raise ValueError(f"layer_types is {kinds!r}; {rule}")
        return {"full_every": Dimension(key, min(every, num_layers + 1))}

    def write(self, args: Any) -> dict[str, Any]:
        """Return the keys of `FullEveryArgs`."""
        is_full = [args.is_full(layer) for layer in range(args.n_layers)]
        found: dict[str, Any] = {"layer_types": [FULL if full else self.kind for full in is_full]}
        if self.pattern:
            found[self.pattern] = is_full.index(True) + 1 if True in is_full else len(is_full) + 1
        return found


@dataclass(frozen=True)
class Windows(FullEvery):
    """The same of a family whose other layers have a window."""

    default: int
    """Of sliding_window, where the key is absent."""
    kind: str = field(default=SLIDING, kw_only=True)

    def read(self, config: Mapping[str, Any], num_layers: int) -> dict[str, Dimension]:
        window = positive("sliding_window", config.get("sliding_window", self.default))
        found = {"window": Dimension("sliding_window", window)}
        return found | super().read(config, num_layers)

    def write(self, args: Any) -> dict[str, Any]:
        return {"sliding_window": args.window} | super().write(args)
