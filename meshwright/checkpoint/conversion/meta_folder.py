"""The content of a model folder of Meta's, and whether it is the wanted model. Free of torch.

`params.json`, and `consolidated.00.pth`, `.01.pth`, ...: one file for each rank of the tensor
parallelism that Meta runs the model with. A file holds its piece of every matrix, cut along one
dimension, and all of every norm.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.conversion.hf_folder import WEIGHT_TYPES, StoredTensor, check_args
from meshwright.checkpoint.index import Record, read_pickle
from meshwright.models.args import DecoderArgs
from meshwright.models.family import MetaForm
from meshwright.system.files import Place

TENSOR = ("torch._utils", "_rebuild_tensor_v2")

PARAMETER = ("torch._utils", "_rebuild_parameter")

TYPES = {"FloatStorage": "F32", "BFloat16Storage": "BF16", "HalfStorage": "F16"}
"""Classes of storages, and safetensors' names of their types."""

ZIP = b"PK\x03\x04"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the dict that `file` holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not such a file, or not a whole one, or holds anything else.
    """
    with open(file, "rb") as stream:
        first = stream.read(len(ZIP))
    if first != ZIP:
        raise ValueError("is not a zip, as torch.save writes since torch 1.6")
    try:
        with zipfile.ZipFile(file) as archive:
            folder = archive.namelist()[0].partition("/")[0]
            pickled = archive.getinfo(f"{folder}/data.pkl")
            if pickled.compress_type != zipfile.ZIP_STORED:  # it may be any size, read
                raise ValueError("is compressed, which torch.save does not do")
            content = archive.read(pickled)
    except (zipfile.BadZipFile, KeyError, IndexError, RuntimeError, EOFError) as error:
        raise ValueError(f"is cut off, or damaged: {error}") from None
    try:
        tensors = read_pickle(content, _is_allowed)
        if not isinstance(tensors, dict):
            raise ValueError("it is no dict of tensors")
        return {str(name): _tensor(file, value) for name, value in tensors.items()}
    except ValueError as error:
        raise ValueError(f"holds more than tensors: {error}") from None


def _is_allowed(module: str, name: str) -> bool:
    is_storage = module == "torch" and name.endswith("Storage")
    return (module, name) in (TENSOR, PARAMETER) or is_storage


def _tensor(file: Path, value: Any) -> StoredTensor:
    try:
        if value.called == ".".join(PARAMETER):
            value = value.arguments[0]
        (_, storage, *_), _, shape, *_ = value.arguments
        assert issubclass(storage, Record)
        kind = storage.called.removeprefix("torch.")
        return StoredTensor(file, TYPES.get(kind, kind), tuple(shape))
    except (AttributeError, AssertionError, IndexError, TypeError, ValueError):
        raise ValueError(f"{value!r} is no tensor") from None


PARAMS = "params.json"

WEIGHTS = re.compile(r"consolidated\.(\d+)\.pth")


@dataclass(frozen=True)
class Pieces:
    """Where the tensors of a folder are."""

    files: list[Path]
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
    files = _weight_files(place.path)
    stored = [_read_header(place, file) for file in files]
    wanted = args.parameter_shapes()
    for name, shape in list(wanted.items()):
        if (copy := form.copy_of(name, args)) and copy in stored[0]:
            wanted[copy] = shape
    cut = {name: _find_cut(place, name, shape, stored) for name, shape in wanted.items()}
    others = sorted(
        name for name in set().union(*stored) if name not in wanted and not form.is_needless(name)
    )
    place.check(
        not others, f"holds {others[0] if others else ''}, for which the model has no place"
    )
    return Pieces(files, cut)


def _read_header(place: Place, file: Path) -> dict[str, StoredTensor]:
    try:
        return read_header(file)
    except OSError as error:
        raise place.error(f"{file.name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        fix = "download it again, or save its dict of tensors with torch.save"
        raise place.error(f"{file.name} {error}", fix) from None


def _find_cut(
    place: Place, name: str, shape: tuple[int, ...], stored: Sequence[Mapping[str, StoredTensor]]
) -> int | None:
    """Return the dimension along which the files hold pieces of a tensor: the embedding is cut
    along its width in files of 2023, along the vocabulary in later ones, so shapes decide."""
    for pieces in stored:
        tie = ", or set model.args.tie_embeddings = true" if name == "output.weight" else ""
        place.check(
            name in pieces,
            f"{name} is not in {next(iter(pieces.values())).file.name if pieces else 'a file'}",
            f"download the folder again{tie}",
        )
        piece = pieces[name]
        place.check(
            piece.dtype in WEIGHT_TYPES,
            f"{name} in {piece.file.name} is of type {piece.dtype}, not {', '.join(WEIGHT_TYPES)}",
        )
    shapes = {pieces[name].shape for pieces in stored}
    number, first = len(stored), stored[0][name].shape
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
