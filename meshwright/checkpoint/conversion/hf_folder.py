"""The content of a Hugging Face model directory, and whether it is the wanted model.

Free of torch, so that a job that can't start says so before any rank does; only a tied model whose
files hold the output projection too needs it, to compare the two tensors.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.conversion.stored import FORMATS, WEIGHT_TYPES, StoredTensor, joined
from meshwright.models.args import DecoderArgs
from meshwright.models.config_json import Dimension, text_config
from meshwright.models.family import TIED, Family, ForeignTensor, HuggingFaceForm
from meshwright.system.errors import ConfigError, as_toml, where_it_ends
from meshwright.system.files import LFS_FIX, LFS_RULE, NamedPath, is_lfs_pointer, warn_once

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

AGAIN = "download or export the folder again"

COMPARED_ROWS = 4096
"""Rows of the vocabulary that are in memory at once while two tensors are compared."""


def is_hf_folder(path: Path) -> bool:
    """Return whether `path` looks like a Hugging Face model directory."""
    return (path / CONFIG).is_file()


TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Beginnings of the names of a text model's tensors in files that hold a vision tower too, and
what the text model's own files have in their place."""


def find_tensors(place: NamedPath) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's safetensors files, by the name it has there; a quantized
    one by its dequantized tensor's, and one of a nested text model by the name without a nest.

    Raises:
        ConfigError: as `_find_stored`.
    """
    return {_text_name(name): tensor for name, tensor in joined(_find_stored(place)).items()}


def _text_name(name: str) -> str:
    for nested, own in TEXT_PREFIXES.items():
        if name.startswith(nested):
            return own + name.removeprefix(nested)
    return name


def _find_stored(place: NamedPath) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's safetensors files.

    With an index, a file gives only the tensors that the index assigns to it: shards of an older
    save may hold others of the same names.

    Raises:
        ConfigError: if there are none, or a file is missing or not whole; or if a single file lies
            next to an index that doesn't name it, so that nothing says which weights are meant.
    """
    folder = place.path
    if not (folder / INDEX).is_file():
        _check_single(place)
        return _read_header(place, SINGLE)
    weight_map = place.read_json(INDEX).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(
        isinstance(file, str) and Path(file).name == file for file in weight_map.values()
    )
    place.check(is_map, f"{INDEX} has no weight_map of tensors to files in the folder")
    assert isinstance(weight_map, dict)
    place.check(
        SINGLE in weight_map.values() or not (folder / SINGLE).exists(),
        f"holds {SINGLE}, and {INDEX}, which doesn't name it: these may be two sets of weights",
        f"delete {SINGLE} to use the shards that the index names, or {INDEX} to use {SINGLE}",
    )
    found: dict[str, StoredTensor] = {}
    for file in sorted({*weight_map.values()}):
        there = _read_header(place, file)
        assigned = [name for name, its_file in weight_map.items() if its_file == file]
        for name in assigned:
            rule = f"{INDEX} says that {name} is in {file}, but it isn't"
            place.check(name in there, rule, AGAIN)
            found[name] = there[name]
        if unused := sorted(there.keys() - assigned):
            words = f"{folder / file}: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}"
            warn_once(f"{words} left out, since {INDEX} doesn't name this file for it")
    return found


def _read_header(place: NamedPath, name: str) -> dict[str, StoredTensor]:
    """Return every tensor in a file; its header has to cover it to the last byte."""
    file = place.path / name
    place.check(file.is_file(), f"{name} is missing, which {INDEX} names", AGAIN)
    try:
        # for its own error: to safetensors every failure is a missing file
        place.check(not is_lfs_pointer(file), f"{name} {LFS_RULE}", LFS_FIX)
        with safe_open(file, framework="numpy") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(name, file, tensor.get_dtype(), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except OSError as error:
        raise place.error(f"{name} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        rule = f"{name} is damaged, or is not a safetensors file: {error}"
        raise place.error(rule, AGAIN) from None


def declared_ends(place: NamedPath) -> frozenset[int]:
    """Return the ids that config.json and generation_config.json of a folder give to EOS.

    Raises:
        ConfigError: if one of them can't be read.
    """
    found = set[int]()
    for name in (CONFIG, GENERATION_CONFIG):
        if (place.path / name).is_file():
            config = place.read_json(name)
            try:
                ids: Any = text_config(config).get("eos_token_id")
            except ValueError as error:
                raise place.error(f"{name}: {error}") from None
            found |= {i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)}
    return frozenset(found)


def _check_single(place: NamedPath) -> None:
    folder = place.path
    if (folder / SINGLE).is_file():
        return
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    place.check(
        not shards,
        f"holds {', '.join(shards[:3])}, but no {INDEX}, which says which file holds which tensor",
        f"download {INDEX} too",
    )
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pth")))
    place.check(
        not pickles,
        f"its weights, {', '.join(pickles[:3])}, are pickles, which can run code when they are "
        "read; only safetensors are",
        "download the safetensors files, or convert it: load it in transformers where you trust "
        "it, then save_pretrained",
    )
    raise place.error(f"holds neither {SINGLE} nor {INDEX}")


def find_family(place: NamedPath, families: Sequence[Family]) -> Family:
    """Return the family that the folder's config.json names.

    Raises:
        ConfigError: if it is none of `families`.
    """
    kind = _read_config(place).get("model_type")
    found = [family for family in families if kind and kind in family.hf.model_types]
    known = ", ".join(family.hf.model_type for family in families)
    fix = "write a family for it (docs/extending.md), or choose a different folder"
    place.check(bool(found), f"{CONFIG}: model_type is {kind!r}, not one of {known}", fix)
    return found[0]


def read_dimensions(place: NamedPath, form: HuggingFaceForm) -> dict[str, Dimension]:
    """Return the folder's config.json as our dimensions.

    Raises:
        ConfigError: if it is of a model that ours can't be.
    """
    config = _read_config(place)
    try:
        found = form.read_config(config)
    except ValueError as error:
        raise place.error(f"{CONFIG}: {error}") from None
    quantized = text_config(config).get("quantization_config") or {}
    for key, only in FORMATS[quantized["quant_method"]].fixed.items() if quantized else ():
        own = quantized.get(key, only)
        rule = f"quantization_config.{key} is {own!r}; can read {only!r} alone"
        place.check(own == only, f"{CONFIG}: {rule}")
    return found


def _read_config(place: NamedPath) -> dict[str, Any]:
    place.check(place.path.is_dir(), "no such folder", where_it_ends(place.path))
    place.check(is_hf_folder(place.path), f"holds no {CONFIG}", "name a Hugging Face directory")
    return place.read_json(CONFIG)


def check_hf_folder(
    place: NamedPath, form: HuggingFaceForm, args: DecoderArgs, *, is_tie_given: bool = False
) -> None:
    """Check that the folder is of a model with `args`, and whole.

    Whether the model is tied is for its tensors to say, not for config.json; see `is_tied_there`.

    Args:
        is_tie_given: the user gave `args.tie_embeddings`, which then holds: an output projection
            next to a tied embedding isn't read.

    Raises:
        ConfigError: naming every dimension that differs, or the first tensor.
    """
    why_not = form.why_not(args)
    place.check(not why_not, f"cannot hold this model: {why_not}")
    there = read_dimensions(place, form)
    tie = there.pop("tie_embeddings")
    check_args(args, there, str(place.path / CONFIG))
    stored = find_tensors(place)
    embedding, output = form.tied_names
    place.check(
        args.tie_embeddings or output in stored,
        f"{output}, our output.weight, is in none of its files, and {CONFIG} has {tie.key} = "
        f"{as_toml(tie.value)}",
        "set model.args.tie_embeddings = true if the output is the embedding; otherwise " + AGAIN,
    )
    check_tensors(place, form, args, stored)
    if args.tie_embeddings and not is_tied_there(form, stored):
        refuse_to_tie(place, embedding, output, is_tie_given=is_tie_given)


def refuse_to_tie(place: NamedPath, embedding: str, output: str, *, is_tie_given: bool) -> None:
    """Raise `ConfigError` because a folder's output projection isn't its embedding, as a tied
    model's is; if the user gave `model.args.tie_embeddings`, log that it isn't read."""
    rule = f"{output} differs from {embedding}"
    place.check(is_tie_given, rule, "set model.args.tie_embeddings = false")
    warn_once(f"{place.path}: {rule}, and isn't read: model.args.tie_embeddings = true")


def is_tied_there(form: HuggingFaceForm, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether the output projection can be the embedding: there is none besides, or it has
    the same values. transformers 5 unties a model by the same comparison, whatever its config.json
    says (modeling_utils.py, `tie_weights`)."""
    embedding, output = (stored.get(name) for name in form.tied_names)
    if embedding is None or output is None:
        return True
    return are_equal(embedding, output)


def are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have equal values; they are compared again if a file changes."""
    states = (tensor.file.stat() for tensor in (one, other))
    return _are_equal(one, other, tuple((it.st_mtime_ns, it.st_size) for it in states))


@lru_cache(16)
def _are_equal(one: StoredTensor, other: StoredTensor, states: tuple[tuple[int, int], ...]) -> bool:
    """Return whether two tensors have equal values; as far as they do, both are read.

    Args:
        states: of their files: if one changes, they are compared again.
    """
    import torch  # here: few folders hold both

    if one.shape != other.shape:
        return False
    with safe_open(one.file, "pt") as left, safe_open(other.file, "pt") as right:
        slices = left.get_slice(one.name), right.get_slice(other.name)
        return all(
            torch.equal(*(part[row : row + COMPARED_ROWS].float() for part in slices))
            for row in range(0, one.shape[0], COMPARED_ROWS)
        )


def check_args(args: DecoderArgs, there: Mapping[str, Dimension], file: str) -> None:
    """Check that `args` equal the dimensions in `file`, each with its key there.

    Raises:
        ConfigError: naming every dimension that differs, and both values.
    """
    messages, keys = [], []
    for name, dimension in there.items():
        ours, theirs = getattr(args.resolved, name), dimension.value
        if ours == theirs:
            continue
        keys.append(f"model.args.{name}")
        fix = f"set {keys[-1]} = {_as_toml(theirs)}"
        if theirs is None:
            fix = f"choose a model.flavor without {name}"
        what = f"{keys[-1]} = {_as_toml(ours)}: {file} has {dimension.key} = {_as_toml(theirs)}"
        messages.append(f"{what}\n  fix: {fix}")
    if messages:
        raise ConfigError(keys[0], "\n".join(messages))


def _as_toml(value: object) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_toml(dataclasses.asdict(value))
    return "none" if value is None else as_toml(value)


def check_tensors(
    place: NamedPath, form: HuggingFaceForm, args: DecoderArgs, stored: Mapping[str, StoredTensor]
) -> dict[str, ForeignTensor]:
    """Check that `stored` are the parameters of the model with `args`, and nothing besides.

    Returns:
        For each of our parameters, its tensor there.

    Raises:
        ConfigError: for the first that is missing, has a different shape or type, or has no place.
    """
    layouts = [form.tensors(args, is_fused=is_fused) for is_fused in (False, True)]
    wanted = max(layouts, key=lambda tensors: sum(t.name in stored for t in tensors.values()))
    embedding, output = form.tied_names
    known = {name for theirs in wanted.values() for name in (*theirs.parts, *theirs.copies)}
    if args.tie_embeddings:
        known.add(output)
        if embedding not in stored and output in stored:
            wanted[TIED] = replace(wanted[TIED], name=output)
    for ours, theirs in wanted.items():
        for name, shape in theirs.parts.items():
            place.check(name in stored, f"{name}, our {ours}, is in none of its files", AGAIN)
            _check_tensor(place, stored[name], shape)
    # old files have buffers that follow from config.json
    others = [n for n in stored if n not in known and not n.endswith("rotary_emb.inv_freq")]
    predictors = [name for name in others if form.is_of_predictor(name, args)]
    if predictors:
        warn_once(
            f"{place.path}: {len(predictors)} tensors, {predictors[0]} the first, left out: they "
            f"are of multi-token prediction, and model.args.mtp_depth = {args.mtp_depth}"
        )
    left_out = {prefix: [n for n in others if n.startswith(prefix)] for prefix in form.left_out}
    for prefix, names in left_out.items():
        if names:
            what = f"{len(names)} tensors of {prefix}*, {names[0]} the first, left out"
            warn_once(f"{place.path}: {what}: they are no part of {form.model_type}")
    for theirs in wanted.values():
        for copy in theirs.copies:
            _check_copy(place, stored, theirs.name, copy)
    known |= {*predictors, *itertools.chain(*left_out.values())}
    if unknown := [name for name in others if name not in known]:
        raise place.error(f"holds {stored[unknown[0]].name}, for which the model has no place")
    return wanted


def _check_copy(place: NamedPath, stored: Mapping[str, StoredTensor], name: str, copy: str) -> None:
    """Check that a layer for MTP has the embedding and the output of the model."""
    place.check(
        copy not in stored or are_equal(stored[name], stored[copy]),
        f"{copy} differs from {name}, which our layers for multi-token prediction share",
        "set model.args.mtp_depth = 0",
    )


def _check_tensor(place: NamedPath, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    where = f"{tensor.name} in {tensor.file.name}"
    place.check(
        tensor.shape == shape,
        f"{where} has shape {tensor.shape}, not {shape}",
        "its config.json is of a different model",
    )
    place.check(
        bool(tensor.parts) or tensor.dtype in WEIGHT_TYPES,
        f"{where} is of type {tensor.dtype}, not {', '.join(WEIGHT_TYPES)}",
    )


def read_args(
    place: NamedPath, form: HuggingFaceForm, kind: type[DecoderArgs], *, is_tie_given: bool = False
) -> DecoderArgs:
    """Return the dimensions that config.json gives. If it says that the model is tied, the tensors
    have the last word, as far as they can be read: a folder may hold a config.json only.

    Args:
        is_tie_given: the user says whether it is tied, so that the tensors needn't be read.

    Raises:
        ConfigError: if they can't be our model's dimensions.
    """
    values = {name: found.value for name, found in read_dimensions(place, form).items()}
    if values["tie_embeddings"] and not is_tie_given:
        with suppress(ConfigError):
            values["tie_embeddings"] = is_tied_there(form, find_tensors(place))
        if not values["tie_embeddings"]:
            embedding, output = form.tied_names
            words = f"{CONFIG} has tie_word_embeddings = true, but {output} differs from"
            warn_once(f"{place.path}: {words} {embedding}: the model is untied")
    try:
        return kind(**values)
    except ValueError as error:
        raise place.error(f"{CONFIG}: {error}") from None
