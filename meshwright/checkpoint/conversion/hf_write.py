"""Weights into safetensors files, one file in memory at a time."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.conversion.hf_folder import INDEX, SINGLE
from meshwright.checkpoint.conversion.readers import halves
from meshwright.models.family import ForeignTensor


def write_weights(
    folder: Path,
    tensors: Mapping[str, ForeignTensor],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> list[Path]:
    """Write every tensor to `folder`, and the index if that takes several files.

    Args:
        tensors: by our name, in the order to write them.
        read: the whole parameter of a name of ours.
        max_shard_bytes: of tensors in a file; a tensor that is larger has a file of its own.

    Raises:
        OSError: if a file cannot be written.
    """
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, foreign in tensors.items():
        size = math.prod(foreign.shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [
        SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, {name: tensors[name] for name in names}, read, dtype)
    if len(shards) > 1:
        count = sum(math.prod(foreign.shape) for foreign in tensors.values())
        weight_map = {
            tensors[name].name: file
            for file, names in zip(files, shards, strict=True)
            for name in names
        }
        index = {"metadata": {"total_size": count * dtype.itemsize}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return [folder / file for file in files]


def _write_file(
    file: Path,
    tensors: Mapping[str, ForeignTensor],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> None:
    content = {theirs.name: _convert(theirs, read(name), dtype) for name, theirs in tensors.items()}
    try:
        save_file(content, file, {"format": "pt"})  # transformers asks for the format
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from None


def _convert(foreign: ForeignTensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.to(dtype)
    if foreign.head_dim is not None:
        tensor = halves(tensor, foreign.head_dim)
    return tensor.contiguous()
