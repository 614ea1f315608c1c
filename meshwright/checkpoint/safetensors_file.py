"""What a safetensors file holds, from its header alone. Free of torch.

Format: 8 bytes, the length of the header (little endian); the header, a JSON object of name ->
{dtype, shape, data_offsets}; the tensors, row by row, little endian. Source: the README of
https://github.com/huggingface/safetensors.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, of the types that a model's weights may have."""
LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, and what."""

    file: Path
    dtype: str
    """F32, BF16, F16, ..."""
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor in `file`.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a safetensors file, or not a whole one.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise ValueError("is not a safetensors file")
        if 8 + length > size:
            raise ValueError(f"is cut off: {size:,} bytes, and its header alone has {length:,}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            found, ends = {}, [0]
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                shape = tuple(int(length) for length in entry["shape"])
                found[name] = StoredTensor(file, str(entry["dtype"]), shape)
                item = ITEM_BYTES.get(entry["dtype"])
                if item is not None and end - begin != math.prod(shape) * item:
                    raise ValueError(f"{name} has {end - begin} bytes for a shape of {shape}")
                ends.append(int(end))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"has a header that makes no sense: {error}") from None
    whole = 8 + length + max(ends)
    if size != whole:
        what = "is cut off" if size < whole else "goes on after its last tensor"
        raise ValueError(f"{what}: {size:,} bytes instead of {whole:,}")
    return found
