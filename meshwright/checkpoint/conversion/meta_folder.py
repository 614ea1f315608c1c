"""The content of a model folder of Meta's, and whether it is the wanted model. Free of torch.

`params.json`, and `consolidated.00.pth`, `.01.pth`, ...: one file for each rank of the tensor
parallelism that Meta runs the model with. A file holds its piece of every matrix, cut along one
dimension, and all of every norm.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.conversion.hf_folder import check_args
from meshwright.models.args import DecoderArgs
from meshwright.models.family import MetaForm
from meshwright.system.files import Place

if TYPE_CHECKING:
    from torch import Tensor

PARAMS = "params.json"

WEIGHTS = re.compile(r"consolidated\.(\d+)\.pth")


@dataclass(frozen=True)
class Pieces:
    """The tensors of a folder."""

    files: "dict[str, dict[str, Tensor]]"
    """By file and name, mapped into memory."""
    cut: Mapping[str, int | None]
    """By name: the dimension along which each file holds a piece; None: each holds all of it."""


def is_meta_folder(path: Path) -> bool:
    """Return whether `path` looks like a model folder of Meta's."""
    return (path / PARAMS).is_file() and bool(_weight_files(path))


def _weight_files(folder: Path) -> list[Path]:
    """In the order of Meta's ranks."""
    numbered = {path: WEIGHTS.fullmatch(path.name) for path in folder.iterdir()}
    files = {int(match[1]): path for path, match in numbered.items() if match}
    return [files[number] for number in sorted(files)]


def check_meta_folder(place: Place, form: MetaForm, args: DecoderArgs) -> Pieces:
    """Check that the folder is of a model with `args`, and whole.

    Raises:
        ConfigError: naming every dimension that differs, or the first tensor.
    """
    params = place.read_json(PARAMS)
    try:
        there = form.read_params(params)
    except ValueError as error:
        raise place.error(f"{PARAMS}: {error}") from None
    differ = {
        name: (dimension.key, dimension.value)
        for name, dimension in there.items()
        if not form.same(name, getattr(args.resolved, name), dimension.value)
    }
    check_args(args, differ, str(place.path / PARAMS))
    files = {file.name: _map(place, file) for file in _weight_files(place.path)}
    wanted = args.parameter_shapes()
    for name, shape in list(wanted.items()):
        if (copy := form.copy_of(name, args)) and copy in next(iter(files.values())):
            wanted[copy] = shape
    cut = {name: _find_cut(place, name, shape, files) for name, shape in wanted.items()}
    names = set().union(*files.values()) - wanted.keys()
    others = sorted(name for name in names if not form.is_needless(name))
    rule = f"holds {others[0] if others else ''}, for which the model has no place"
    place.check(not others, rule)
    return Pieces(files, cut)


TYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
"""That weights may have."""


def _map(place: Place, file: Path) -> "dict[str, Tensor]":
    """Return the tensors of a file, mapped into memory: unused parts are not read."""
    import torch  # here: no check of another job waits for it

    fix = "download it again, or save its dict of tensors with torch.save"
    try:
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        values = tensors.values() if isinstance(tensors, dict) else (None,)
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise ValueError("it is no dict of tensors")
        return {str(name): value for name, value in tensors.items()}
    except Exception as error:  # a damaged file raises any exception
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        # without torch's advice to let the file run code, which it gives before or after
        if reason.startswith("Weights only load failed"):
            reason = reason.partition("\n")[2].strip()
        reason = reason.partition("\n")[0].partition(" Please use")[0] or type(error).__name__
        raise place.error(f"{file.name} cannot be read as tensors: {reason}", fix) from None


def _find_cut(
    place: Place, name: str, shape: tuple[int, ...], files: "Mapping[str, Mapping[str, Tensor]]"
) -> int | None:
    """Return the dimension along which the files hold pieces of a tensor: the embedding is cut
    along its width in files of 2023, along the vocabulary in later ones, so shapes decide."""
    tie = ", or set model.args.tie_embeddings = true" if name == "output.weight" else ""
    for file, tensors in files.items():
        rule = f"{name} is not in {file}"
        place.check(name in tensors, rule, f"download the folder again{tie}")
        kind, rule = str(tensors[name].dtype), f"not of {', '.join(TYPES)}"
        place.check(kind in TYPES, f"{name} in {file} is of {kind}, {rule}")
    shapes = {tuple(tensors[name].shape) for tensors in files.values()}
    number, first = len(files), tensors[name].shape
    if shapes == {shape}:
        return None
    cut = [
        dim
        for dim, size in enumerate(first)
        if shapes == {(*shape[:dim], size, *shape[dim + 1 :])} and size * number == shape[dim]
    ]
    place.check(
        bool(cut),
        f"{name} has shape {', '.join(map(str, sorted(shapes)))} in its {number} files, which is "
        f"neither all of {shape} nor a piece of it",
        f"download the missing files, if there are more, or the {PARAMS} that belongs to them",
    )
    return cut[0]
