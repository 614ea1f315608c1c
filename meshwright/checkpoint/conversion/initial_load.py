"""Finds and checks the folder of `checkpoint.initial_load_path`: a checkpoint of meshwright's, or
a Hugging Face model directory.

Free of torch, apart from tied models, whose tensors are compared.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.checkpoint.conversion.hf_folder import (
    check_args,
    check_hf_folder,
    find_tensors,
    is_hf_folder,
)
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.store import find_candidates, saved_args, select
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.config_json import Dimension
from meshwright.models.family import Family
from meshwright.system.errors import check, where_it_ends
from meshwright.system.files import NamedPath

LOAD_KEY = "checkpoint.initial_load_path"


class InitialWeights(NamedTuple):
    """A folder to start from."""

    kind: Literal["ours", "hf"]
    place: NamedPath
    """The step's folder, if the format has steps."""
    manifest: Manifest | None = None
    """Of ours."""


def find_initial(config: Checkpoint) -> InitialWeights:
    """Return the folder to start from; the content of its files isn't read.

    Raises:
        ConfigError: if it isn't there, not of the kind that is said, or damaged.
    """
    place = NamedPath(LOAD_KEY, Path(config.initial_load_path))
    if not place.path.exists():
        raise place.error("no such folder", where_it_ends(place.path))
    place.check(place.path.is_dir(), "is not a folder", where_it_ends(place.path))
    if config.initial_load_in_hf:
        place.check(is_hf_folder(place.path), "holds no config.json of Hugging Face", _other(False))
        return InitialWeights("hf", place)
    candidates = find_candidates(place)
    _reject_other_formats(place, candidates)
    is_other = not candidates and is_hf_folder(place.path)
    place.check(not is_other, "holds no checkpoint", _other(True))
    return InitialWeights("ours", *select(place, candidates))


def _reject_other_formats(place: NamedPath, candidates: Sequence[Path]) -> None:
    """Raise `ConfigError` for a folder of Meta's, or an index of torch's without our manifest."""
    use_hf = "set checkpoint.initial_load_in_hf = true"
    has_params = (place.path / "params.json").is_file()
    if has_params and any(place.path.glob("consolidated.*.pth")):
        raise place.error(
            "holds Meta's own format (params.json, consolidated.*.pth), which isn't read",
            "download the model's safetensors, for example `hf download meta-llama/Llama-3.1-8B "
            f"--exclude 'original/*' --local-dir FOLDER`, name that folder, and {use_hf}",
        )
    folders = candidates or [place.path]
    if all((one / INDEX).is_file() and not (one / MANIFEST).exists() for one in folders):
        raise NamedPath(LOAD_KEY, folders[0]).error(
            f"has no {MANIFEST}: it is torchtitan's, or was copied in part",
            "copy all of it, or convert torchtitan's by its scripts/checkpoint_conversion/"
            f"convert_to_hf.py, and {use_hf}",
        )


def _other(is_hf: bool) -> str:
    kind = "a Hugging Face directory" if is_hf else "one of meshwright's"
    return f"set checkpoint.initial_load_in_hf = {str(is_hf).lower()} if it is {kind}"


def check_initial(
    config: Checkpoint, args: DecoderArgs, family: Family, *, is_tie_given: bool = False
) -> None:
    """Check that the folder to start from, if there is one, holds weights of a model with `args`.

    Args:
        family: of the model, with the forms in which others have it.
        is_tie_given: the user gave `args.tie_embeddings`: an output projection that differs from
            the embedding is then left out, if they are to be tied, and otherwise rejected.

    Raises:
        ConfigError: naming the fault.
    """
    if not config.initial_load_path:
        return
    kind, place, manifest = find_initial(config)
    _check_predictors(config, args, _depth_there(place, manifest, family, args))
    family, args = family_there(config, args, family)
    match kind:
        case "hf":
            check_hf_folder(place, family.hf, args, is_tie_given=is_tie_given)
        case "ours":
            assert manifest is not None
            name = manifest["model_name"]
            check(
                name == family.name,
                "model.name",
                family.name,
                f"{place.path} holds weights of the family {name!r}",
                f'set model.name = "{name}", or start from a different folder'
                if config.initial_load_upcycle_noise is None
                else "start from a different folder",
            )
            saved = saved_args(place, manifest, type(args)).resolved
            names = [field.name for field in dataclasses.fields(saved)]
            there = {name: Dimension(f"model.args.{name}", getattr(saved, name)) for name in names}
            check_args(args, there, str(place.path))


NEW_MTP_KEY = "checkpoint.initial_load_new_mtp"


def _depth_there(
    place: NamedPath, manifest: Manifest | None, family: Family, args: DecoderArgs
) -> int:
    """Return how many layers of the folder are for MTP."""
    if manifest is not None:
        return int(manifest["model_args"].get("mtp_depth", 0))
    if not args.mtp_depth:  # they are left out
        return 0
    names = (name for name in find_tensors(place) if family.hf.is_of_predictor(name, args))
    return len({name.split(".")[2] for name in names})


def _check_predictors(config: Checkpoint, args: DecoderArgs, depth_there: int) -> None:
    """Raise `ConfigError` if the layers for MTP would be new, and the config doesn't say so, or the
    other way round."""
    key, depth = "model.args.mtp_depth", args.mtp_depth
    if config.initial_load_new_mtp:
        rule, fix = f"{key} = 0: the model has no layers for MTP", f"set {key} = 1, or leave it out"
        check(depth > 0, NEW_MTP_KEY, True, rule, fix)
        rule = f"{config.initial_load_path} holds weights of mtp_depth = {depth_there}"
        check(depth_there == 0, NEW_MTP_KEY, True, rule, "leave it out")
        return
    fix = f"set it to {depth_there}"
    if depth_there == 0:
        fix += f", or {NEW_MTP_KEY} = true to train new ones"
    rule = f"{config.initial_load_path} holds weights of mtp_depth = {depth_there}"
    check(depth == depth_there, key, depth, rule, fix)


UPCYCLE_KEY = "checkpoint.initial_load_upcycle_noise"


def family_there(
    config: Checkpoint, args: DecoderArgs, family: Family
) -> tuple[Family, DecoderArgs]:
    """Return the family and the dimensions of the weights to start from: the model's, but for new
    layers, or the dimensions of the dense model whose MLPs become its experts.

    Raises:
        ConfigError: if there is no such dense model.
    """
    if config.initial_load_new_mtp:
        args = dataclasses.replace(args, mtp_depth=0)
    noise = config.initial_load_upcycle_noise
    if noise is None:
        return family, args
    mixtures = args.table.mixtures.values()
    check(bool(mixtures), UPCYCLE_KEY, noise, "the model has no experts", "leave it out")
    dense = family.dense
    rule = f"no dense family has the other layers of {family.name}"
    check(dense is not None, UPCYCLE_KEY, noise, rule, "leave it out")
    assert dense is not None
    why_not = family.hf.why_not(args)  # dense families have neither
    check(not why_not, UPCYCLE_KEY, noise, why_not, "leave it out")
    fields = dataclasses.fields(dense.args)
    values: dict[str, Any] = {field.name: getattr(args, field.name, None) for field in fields}
    width = values["hidden_dim"]
    for mixture in mixtures:
        key, rule = "model.args.normalize_experts", "copies then add up to less than the original"
        check(mixture.normalizes, key, False, rule, f"set {key} = true")
        key, own = "model.args.expert_dim", mixture.hidden_dim
        rule = f"must be that of the feed-forward to copy, model.args.hidden_dim = {width}"
        check(own == width, key, own, rule, f"set {key} = {width}")
    return dense, dense.args(**values)
