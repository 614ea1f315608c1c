"""The content of a model folder of Meta's, and whether it is the wanted model. Free of torch.

`params.json`, and `consolidated.00.pth`, `.01.pth`, ...: one file for each rank of the tensor
parallelism that Meta runs the model with. A file holds its piece of every matrix, cut along one
dimension, and all of every norm.
"""

import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.conversion.hf_folder import check_args
from meshwright.models.args import DecoderArgs
from meshwright.models.family import TIED, Family
from meshwright.system.files import Place

if TYPE_CHECKING:
    from torch import Tensor

PARAMS = "params.json"

WEIGHTS = re.compile(r"consolidated\.(\d+)\.pth")


def is_meta_folder(path: Path) -> bool:
    """Return whether `path` looks like a model folder of Meta's."""
    return (path / PARAMS).is_file() and bool(_weight_files(path))


def _weight_files(folder: Path) -> list[Path]:
    """In the order of Meta's ranks."""
    numbered = {path: WEIGHTS.fullmatch(path.name) for path in folder.iterdir()}
    files = {int(match[1]): path for path, match in numbered.items() if match}
    return [files[number] for number in sorted(files)]


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
    found = {name: (dimension.key, dimension.value) for name, dimension in there.items()}
    scaling = getattr(args, "rope_scaling", None)
    if scaling and found["rope_scaling"][1]:  # it does not say by how much
        del found["rope_scaling"]
    check_args(args, found, str(place.path / PARAMS))
    files = {file.name: _map(place, file) for file in _weight_files(place.path)}
    wanted = args.parameter_shapes()
    names = set().union(*files.values())
    if args.tie_embeddings and COPY in names:
        wanted[COPY] = wanted[TIED]
    parts = {name: _find_parts(place, name, shape, files) for name, shape in wanted.items()}
    others = sorted(names - wanted.keys() - {"rope.freqs"})  # which follow from params.json
    rule = f"holds {others[0] if others else ''}, for which the model has no place"
    place.check(not others, rule)
    return parts


COPY = "output.weight"
"""In the files even where it is the embedding once more."""

TYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
"""That weights may have."""


def _map(place: Place, file: Path) -> "dict[str, Tensor]":
    """Return the tensors of a file, mapped into memory: unused parts are not read."""
    import torch  # here: no check of another job waits for it

    try:
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        found = {str(name): value for name, value in tensors.items()}
        is_good = all(isinstance(value, torch.Tensor) for value in found.values())
    except Exception:  # a damaged file raises any; torch's text advises to let the file run code
        is_good = False
    place.check(
        is_good,
        f"{file.name} is no dict of tensors, or is damaged",
        "download it again, or save its dict of tensors with torch.save",
    )
    return found


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
