"""Weights into safetensors files, one tensor in memory at a time."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.conversion.hf_folder import INDEX, SINGLE
from meshwright.checkpoint.conversion.readers import halves
from meshwright.models.family import ForeignTensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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
    """One safetensors file, without a copy of its tensors in memory.

    Format: 8 bytes, the length of the header (little endian); the header, a JSON object of name ->
    {dtype, shape, data_offsets}; the tensors, row by row, little endian. Source: the README of
    https://github.com/huggingface/safetensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for foreign in tensors.values():
        begin, end = end, end + math.prod(foreign.shape) * dtype.itemsize
        header[foreign.name] = {
            "dtype": DTYPES[dtype],
            "shape": foreign.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name, foreign in tensors.items():
            tensor = read(name).to(dtype)
            if foreign.head_dim is not None:
                tensor = halves(tensor, foreign.head_dim)
            stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
            del tensor  # before the next is read
