"""Finds and checks the folder of `checkpoint.initial_load_path`, in any format.

Free of torch, apart from tied models, whose tensors are compared, and from Meta's format:
`params.json`, and `consolidated.00.pth`, `.01.pth`, ..., a file for each rank of the tensor
parallelism that Meta runs the model with. A file holds its piece of every matrix, cut along one
dimension, and all of every norm.
"""

import dataclasses
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwright.checkpoint.conversion.hf_folder import (
    check_args,
    check_hf_folder,
    is_hf_folder,
    refuse_to_tie,
)
from meshwright.checkpoint.find import check_complete, find_candidates, first_good, saved_args
from meshwright.checkpoint.index import INDEX, SavedTensor, read_saved_tensors
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.config_json import Dimension
from meshwright.models.family import TIED, Family
from meshwright.system.errors import ConfigError, check, where_it_ends
from meshwright.system.files import LFS_FIX, LFS_RULE, Place, is_lfs_pointer

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 10
"""Tensors that an error names at most."""


def is_torchtitan_folder(path: Path) -> bool:
    """Return whether `path` looks like a step's folder of torchtitan's."""
    return (path / INDEX).is_file() and not (path / MANIFEST).exists()


OF_MODEL = ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head.")
"""Beginnings of parameters' names in torchtitan's checkpoints, after the prefix."""


def find_names(place: Place, family: Family, args: DecoderArgs) -> dict[str, str]:
    """Return the name in torchtitan's checkpoint of each parameter of the model with `args`.

    Raises:
        ConfigError: naming every tensor that is missing, has another shape, or has no place.
    """
    if (renamed := family.torchtitan) is None:
        fix = "export it to Hugging Face's form there, and set checkpoint.initial_load_in_hf = true"
        raise place.error(f"is torchtitan's, whose form of {family.name} cannot be read", fix)
    saved = read_saved_tensors(place)
    place.check(
        not any(name.startswith("rng.") for name in saved),
        f"is a checkpoint of meshwright's that is damaged: it has no {MANIFEST}",
        "name another step's folder",
    )
    # a saved whole state has the model beside the rest, or below "model"
    prefix = next((p for p in ("", "model.") if _of_model(saved, p)), "")

    def names_there(ours: str) -> list[str]:
        others = [ours.replace(*names) for names in renamed.items() if names[0] in ours]
        return [prefix + name for name in (ours, *others)]

    found, wrong = {}, []
    for ours, parameter in args.table.parameters.items():
        theirs = next((name for name in names_there(ours) if name in saved), None)
        if theirs is None:
            wrong.append(f"{prefix}{ours} is not there")
        elif saved[theirs].shape != parameter.shape:
            wrong.append(f"{theirs} has shape {saved[theirs].shape} there, not {parameter.shape}")
        found[ours] = theirs or ""
    tied = {*names_there("output.weight")} if args.tie_embeddings else set()
    others = sorted(_of_model(saved, prefix) - {*found.values()} - tied)
    wrong += [f"{name} has no place in the model" for name in others]
    place.check(
        not wrong,
        f"is a checkpoint of torchtitan's, or of another model: {'; '.join(wrong[:SHOWN])}",
        "set model.flavor and model.args to the model that it is of",
    )
    return found


def _check_torchtitan(
    place: Place, family: Family, args: DecoderArgs, *, is_tie_given: bool
) -> None:
    """Check that torchtitan's checkpoint is of a model of `family` with `args`, tied if that is."""
    names = find_names(place, family, args)
    if not args.tie_embeddings:
        return
    from meshwright.checkpoint.reader import CheckpointWeights  # here: it needs torch

    weights = CheckpointWeights(place, names.__getitem__)
    embedding = names[TIED]
    for word in ("output", *(family.torchtitan or {}).values()):
        output = embedding.replace("tok_embeddings", word.strip("."))
        if output in weights.saved and output != embedding:
            names[output] = output
            if not _have_equal_values(weights.read(TIED), weights.read(output)):
                refuse_to_tie(place, embedding, output, is_tie_given=is_tie_given)


def _have_equal_values(one: "Tensor", other: "Tensor") -> bool:
    return one.shape == other.shape and bool((one.float() == other.float()).all())


def _of_model(saved: Mapping[str, SavedTensor], prefix: str) -> set[str]:
    return {name for name in saved if name.startswith(tuple(prefix + start for start in OF_MODEL))}


PARAMS = "params.json"

WEIGHTS = "consolidated.*.pth"


def is_meta_folder(path: Path) -> bool:
    """Return whether `path` looks like a model folder of Meta's."""
    return (path / PARAMS).is_file() and any(path.glob(WEIGHTS))


def _in_order(folder: Path) -> list[Path]:
    """Return the files by their numbers, which may lack zeros in front."""
    return sorted(folder.glob(WEIGHTS), key=lambda file: (len(file.name), file.name))


Parts = list[tuple[tuple[int, ...], "Tensor"]]
"""Of a tensor: each with its offset in the whole, mapped into memory."""


def check_meta_folder(place: Place, family: Family, args: DecoderArgs) -> dict[str, Parts]:
    """Check that the folder is of a model of `family` with `args`, and whole; return its tensors.

    Raises:
        ConfigError: naming every dimension that differs, or the first tensor.
    """
    if family.meta is None:
        raise place.error(f"is a folder of Meta's, and Meta has no {family.name}")
    try:
        there = family.meta(place.read_json(PARAMS))
    except ValueError as error:
        raise place.error(f"{PARAMS}: {error}") from None
    scaling = getattr(args, "rope_scaling", None)
    if scaling and there["rope_scaling"].value:  # it does not say by how much
        del there["rope_scaling"]
    check_args(args, there, str(place.path / PARAMS))
    files = {file.name: _map(place, file) for file in _in_order(place.path)}
    wanted = {name: parameter.shape for name, parameter in args.table.parameters.items()}
    names = set().union(*files.values())
    if args.tie_embeddings and COPY in names:
        wanted[COPY] = wanted[TIED]
    parts = {name: _find_parts(place, name, shape, files) for name, shape in wanted.items()}
    others = sorted(names - wanted.keys() - {"rope.freqs"})  # which follow from params.json
    if others:
        raise place.error(f"holds {others[0]}, for which the model has no place")
    return parts


COPY = "output.weight"
"""In the files even where it is the embedding once more."""

TYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
"""That weights may have."""


def _map(place: Place, file: Path) -> "dict[str, Tensor]":
    """Return the tensors of a file, mapped into memory: unused parts are not read."""
    import torch  # here: no check of another job waits for it

    try:
        place.check(not is_lfs_pointer(file), f"{file.name} {LFS_RULE}", LFS_FIX)
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        found = {str(name): value for name, value in tensors.items()}
        is_good = all(isinstance(value, torch.Tensor) for value in found.values())
    except ConfigError:
        raise
    except OSError as error:
        raise place.error(f"{file.name} cannot be read: {error.strerror or error}") from None
    except Exception:  # a damaged file raises any; torch's text advises to let the file run code
        is_good = False
    place.check(
        is_good,
        f"{file.name} is no dict of tensors, or is damaged",
        "download it again, or save its dict of tensors with torch.save",
    )
    return found


def _check_meta(place: Place, family: Family, args: DecoderArgs, *, is_tie_given: bool) -> None:
    """Check that Meta's folder is of a model of `family` with `args`, tied if that is."""
    parts = check_meta_folder(place, family, args)
    if args.tie_embeddings and COPY in parts:
        one, other = (_assemble(parts[name]) for name in (TIED, COPY))
        if not _have_equal_values(one, other):
            refuse_to_tie(place, TIED, COPY, is_tie_given=is_tie_given)


def _assemble(parts: Parts) -> "Tensor":
    """Return the tensor that `parts` are of."""
    import torch  # as in `_map`

    ends = [
        [start + length for start, length in zip(offset, part.shape, strict=True)]
        for offset, part in parts
    ]
    whole = torch.empty([max(of) for of in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    for offset, part in parts:
        box = zip(offset, part.shape, strict=True)
        whole[tuple(slice(start, start + length) for start, length in box)] = part
    return whole


def _find_parts(
    place: Place, name: str, shape: tuple[int, ...], files: "Mapping[str, Mapping[str, Tensor]]"
) -> Parts:
    """Return the parts of a tensor. The embedding is cut along its width in files of 2023, along
    the vocabulary in later ones, so shapes decide."""
    tie = ", or set model.args.tie_embeddings = true" if name == "output.weight" else ""
    for file, tensors in files.items():
        rule = f"{name} is not in {file}"
        place.check(name in tensors, rule, f"download the folder again{tie}")
        kind, rule = str(tensors[name].dtype), f"not of {', '.join(TYPES)}"
        place.check(kind in TYPES, f"{name} in {file} is of {kind}, {rule}")
    parts = [tensors[name] for tensors in files.values()]
    if all(tuple(part.shape) == shape for part in parts):
        return [((0,) * len(shape), parts[0])]
    for dim, length in enumerate(shape):
        size = (*shape[:dim], length // len(parts), *shape[dim + 1 :])
        if length % len(parts) == 0 and all(tuple(part.shape) == size for part in parts):
            offsets = ((*(0,) * dim, n * size[dim], *(0,) * len(shape[dim + 1 :])) for n in count())
            return [*zip(offsets, parts, strict=False)]
    shapes = ", ".join(sorted({str(tuple(part.shape)) for part in parts}))
    raise place.error(
        f"{name} has shape {shapes} in its {len(parts)} files, which is neither all of {shape} nor "
        "a piece of it",
        f"download the missing files, if there are more, or the {PARAMS} that belongs to them",
    )


LOAD_KEY = "checkpoint.initial_load_path"


class InitialWeights(NamedTuple):
    """A folder to start from."""

    kind: Literal["ours", "hf", "meta", "torchtitan"]
    place: Place
    """The step's folder, if the format has steps."""
    manifest: Manifest | None = None
    """Of ours."""


def find_initial(config: Checkpoint) -> InitialWeights:
    """Return the folder to start from; the content of its files is not read.

    Raises:
        ConfigError: if it is not there, not of the kind that is said, or damaged.
    """
    place = Place(LOAD_KEY, Path(config.initial_load_path))
    if not place.path.exists():
        raise place.error("no such folder", where_it_ends(place.path))
    place.check(place.path.is_dir(), "is not a folder")
    if config.initial_load_in_hf:
        place.check(is_hf_folder(place.path), "holds no config.json of Hugging Face", _other(False))
        return InitialWeights("hf", place)
    if is_meta_folder(place.path):
        return InitialWeights("meta", place)
    if is_torchtitan_folder(place.path):
        check_complete(place)
        return InitialWeights("torchtitan", place)
    candidates = find_candidates(place)
    if candidates and all(is_torchtitan_folder(inner) for inner in candidates):
        return InitialWeights("torchtitan", Place(LOAD_KEY, candidates[0]))
    found = first_good(place, candidates)
    if found is None:
        is_hf = is_hf_folder(place.path)
        raise place.error("holds no checkpoint", _other(True) if is_hf else "")
    return InitialWeights("ours", Place(LOAD_KEY, found.path), found.manifest)


def _other(is_hf: bool) -> str:
    kind = "a folder of Hugging Face's" if is_hf else "one of Meta's, torchtitan's or meshwright's"
    return f"set checkpoint.initial_load_in_hf = {str(is_hf).lower()} if it is {kind}"


def check_initial(
    config: Checkpoint, args: DecoderArgs, family: Family, *, is_tie_given: bool = False
) -> None:
    """Check that the folder to start from, if there is one, holds weights of a model with `args`.

    Args:
        family: of the model, with the forms in which others have it.
        is_tie_given: the user gave `args.tie_embeddings`: an output projection that differs from
            the embedding is then left out, if they are to be tied, and otherwise refused.

    Raises:
        ConfigError: naming the fault.
    """
    if not config.initial_load_path:
        return
    family, args = family_there(config, args, family)
    kind, place, manifest = find_initial(config)
    match kind:
        case "hf":
            check_hf_folder(place, family.hf, args, is_tie_given=is_tie_given)
        case "meta":
            _check_meta(place, family, args, is_tie_given=is_tie_given)
        case "torchtitan":
            _check_torchtitan(place, family, args, is_tie_given=is_tie_given)
        case "ours":
            assert manifest is not None
            name = manifest["model_name"]
            check(
                name == family.name,
                "model.name",
                family.name,
                f"{place.path} holds weights of the family {name!r}",
                f'set model.name = "{name}", or start from another folder'
                if config.initial_load_upcycle_noise is None
                else "start from another folder",
            )
            saved = saved_args(place, manifest, type(args)).resolved
            names = [field.name for field in dataclasses.fields(saved)]
            there = {name: Dimension(f"model.args.{name}", getattr(saved, name)) for name in names}
            check_args(args, there, str(place.path))


UPCYCLE_KEY = "checkpoint.initial_load_upcycle_noise"


def family_there(
    config: Checkpoint, args: DecoderArgs, family: Family
) -> tuple[Family, DecoderArgs]:
    """Return the family and the dimensions of the weights to start from: the model's, or the dense
    ones whose feed-forwards become its experts.

    Raises:
        ConfigError: if there is no such dense model.
    """
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
