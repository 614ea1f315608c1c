"""The content of a safetensors file, from its header alone. Free of torch."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, of the types that a model's weights may have."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place, shape and type."""

    file: Path
    dtype: str
    """F32, BF16, F16, ..."""
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor in `file`.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a safetensors file, or not a whole one: the header has to cover
            the file to its last byte.
    """
    file.open("rb").close()  # for its own error: to safetensors every failure is a missing file
    try:
        with safe_open(file, framework="numpy") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, tensor.get_dtype(), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"is damaged, or is not a safetensors file: {reason}") from None
