"""Lays a TOML, or the command line, over the TOML below it, and fills in paths that follow.

Keys that belong to a replaced value go with it: the keys of data, the tokenizer of a model.
Otherwise a preset's would be taken for the user's, without a word.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.config.fields import Key, find_field
from meshwright.config.provenance import Provenance
from meshwright.config.section import LOCAL_PATH, is_path
from meshwright.config.training import Source

ROWS = ("json", "parquet", "arrow")
"""Datasets whose rows the same keys describe."""

WAYS = ("dataset_path", "datasets", "mix_file")
"""Keys that name files of data, each instead of the others."""

OF_FOLDER = ("name", "tokenizer_path", "bos_token", "eos_token", "chat_template_path")
"""Keys of [model] that a model folder has in it."""


def lay_over(base: dict[str, Any], over: Mapping[str, Any], provenance: Provenance) -> None:
    """Lay `over` over `base`, in place, less the keys of a model or data that `over` replaces."""
    _leave_out_model(base, over, provenance)
    _leave_out_data(base, over, provenance)
    merge(base, over)


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay `over` over `base`, in place, table by table."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def _leave_out_model(base: dict[str, Any], over: Mapping[str, Any], provenance: Provenance) -> None:
    """Where `over` names a model folder as flavor, leave out the keys of `base` for another
    model."""
    model, inherited = over.get("model", {}), base.get("model", {})
    flavor = model.get("flavor")
    is_other = isinstance(flavor, str) and is_path(flavor) and flavor != inherited.get("flavor")
    if not is_other or not isinstance(inherited, dict):
        return
    leave_out(inherited, {*OF_FOLDER} - {*model}, ("model",), provenance)
    args, own = inherited.get("args"), model.get("args", {})
    if isinstance(args, dict) and isinstance(own, dict):
        leave_out(args, {*args} - {*own}, ("model", "args"), provenance)
    here, there = over.get("checkpoint", {}), base.get("checkpoint", {})
    if (there | here).get("initial_load_in_hf") is True and "initial_load_path" not in here:
        leave_out(there, {"initial_load_path"}, ("checkpoint",), provenance)


def leave_out(table: dict[str, Any], names: set[str], section: Key, provenance: Provenance) -> None:
    """Remove the keys `names` of `section` from its table, and note where they were given."""
    for name in sorted(names & {*table}):
        del table[name]
        provenance.leave_out((*section, name))


def _leave_out_data(base: dict[str, Any], over: Mapping[str, Any], provenance: Provenance) -> None:
    """Where `over` names other data, leave out the keys of the data that `base` names."""
    default, holds_out = Source.model_fields["dataset"].default, False
    for section in ("training", "validation"):  # in this order
        here, inherited = over.get(section, {}), base.get(section)
        named = (inherited or {}).get("dataset", default)
        names_other = "datasets" in here or here.get("dataset", named) != named
        # a preset that says how rows are to be read, of files that it doesn't name
        is_template = named in ROWS and not any((inherited or {}).get(key) for key in WAYS)
        goes = {*WAYS} if any(here.get(key) for key in WAYS) else set[str]()
        if (names_other and not is_template) or (holds_out and "dataset" not in here):
            goes = {*Source.model_fields, *WAYS}
        if isinstance(inherited, dict):
            for key in goes - {*here}:
                inherited.pop(key, None)
                provenance.forget((section, key))
        holds_out = bool(here.get("validation_fraction"))


def unset_empty_paths(raw: dict[str, Any], provenance: Provenance, place: Key = ()) -> None:
    """Remove every optional path that is "", in place: so a TOML unsets one that it inherits."""
    for name, value in [*raw.items()]:
        key = (*place, name)
        for inner_key, inner in _tables(key, value):
            unset_empty_paths(inner, provenance, inner_key)
        field = find_field(key)
        is_optional = field is not None and LOCAL_PATH in field.metadata and field.default == ""
        if value == "" and is_optional:
            del raw[name]
            provenance.forget(key)


def _tables(key: Key, value: object) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield the tables that a value is, or has in its list, each with its key."""
    if isinstance(value, dict):
        yield key, value
    for number, inner in enumerate(value if isinstance(value, list) else ()):
        if isinstance(inner, dict):
            yield (*key, str(number)), inner


def follow_folder(raw: dict[str, Any]) -> None:
    """Take the tokenizer from the folder that `model.flavor` names, and the initial weights if
    `checkpoint.initial_load_in_hf` asks for some, in place, unless they are given."""
    model, checkpoint = raw.get("model", {}), raw.get("checkpoint", {})
    flavor = model.get("flavor")
    if not (isinstance(flavor, str) and is_path(flavor)):
        return
    raw["model"] = {"tokenizer_path": flavor} | model
    if checkpoint.get("initial_load_in_hf") is True:
        raw["checkpoint"] = {"initial_load_path": flavor} | checkpoint
