"""Tensors of a folder's safetensors files, plain and quantized.

Free of torch, but for the functions that read values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_TYPES = ("F32", "BF16", "F16")
"""Types that a model's weights may have, as safetensors names them."""

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place, shape and type."""

    name: str
    file: Path
    dtype: str
    """F32, BF16, F16, ...; of a quantized one a key in `FORMATS`."""
    shape: tuple[int, ...]
    parts: "tuple[StoredTensor, ...]" = ()
    """The tensors that stand for it, if it is quantized."""


@dataclass(frozen=True)
class Format:
    """A format of quantized weights."""

    parts: tuple[tuple[str, str], ...]
    """What the names of the tensors that stand for one add to its name, and their types."""
    shape: Callable[[Sequence[tuple[int, ...]]], tuple[int, ...] | None]
    """Returns its shape, from theirs; None: they don't fit each other."""
    read: "Callable[[Sequence[Any], Slices], Tensor]"
    """Returns a part of its values from theirs, which safetensors gives as slices."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of quantization_config that can have but one value."""


MXFP4_BLOCK = 32
"""Numbers of 4 bits that share a scale, two in a byte."""


def _shape_of_mxfp4(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """(E, R, G, 16) and (E, R, G) -> (E, 32 G, R): transformers transposes matrices."""
    experts, rows, groups = shapes[1]
    return experts, MXFP4_BLOCK * groups, rows


def _read_mxfp4(parts: Sequence[Any], box: Slices) -> "Tensor":
    """Dequantize in fp32, which is exact.

    Source: OCP Microscaling Formats v1.0, section 5: of 4 bits the first is the sign, two are the
    exponent and one is the mantissa; a scale is a power of two, of which it has the exponent + 127.
    """
    import torch  # not where a folder is only looked at

    experts, columns, rows = box
    first = columns.start // MXFP4_BLOCK
    groups = slice(first, -(-columns.stop // MXFP4_BLOCK))
    packed, scales = (part[experts, rows, groups] for part in parts)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes])
    codes = torch.stack([packed & 0xF, packed >> 4], -1)  # the low bits come first
    numbers = torch.ldexp(table[codes.flatten(-2).int()], scales.int().unsqueeze(-1) - 127)
    whole = numbers.flatten(-2).mT
    return whole[:, columns.start - first * MXFP4_BLOCK :][:, : columns.stop - columns.start]


FP8_BLOCK = 128
"""Rows and columns of a matrix that share a scale; the last block has the rest of them."""


def _shape_of_fp8(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    matrix, scales = shapes
    fits = len(matrix) == 2 and scales == tuple(-(-size // FP8_BLOCK) for size in matrix)
    return matrix if fits else None


def _read_fp8(parts: Sequence[Any], box: Slices) -> "Tensor":
    """Multiply each block by its scale in fp32, as transformers does. Names of scales end in "inv"
    because values were divided by their inverses.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2, and README_WEIGHTS.md of its files.
    """
    import torch  # not where a folder is only looked at

    values, scales = parts
    blocks = [slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)) for part in box]
    spread: Tensor = scales[tuple(blocks)]
    for dimension, (part, own) in enumerate(zip(box, blocks, strict=True)):
        of_each = torch.arange(part.start, part.stop) // FP8_BLOCK - own.start
        spread = spread.index_select(dimension, of_each)
    found: Tensor = values[box].float() * spread
    return found


FORMATS: Mapping[str, Format] = {
    "fp8": Format(
        (("", "F8_E4M3"), ("_scale_inv", "F32")),
        _shape_of_fp8,
        _read_fp8,
        {"weight_block_size": [FP8_BLOCK, FP8_BLOCK], "fmt": "e4m3"},
    ),
    "mxfp4": Format((("_blocks", "U8"), ("_scales", "U8")), _shape_of_mxfp4, _read_mxfp4),
}
"""By quant_method in config.json."""


def joined(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of files, where each quantized one takes the place of those that stand for
    it."""
    found = {**stored}
    for method, form in FORMATS.items():
        *_, (last, _) = form.parts
        for base in [name.removesuffix(last) for name in stored if name.endswith(last)]:
            parts = [stored.get(base + end) for end, _ in form.parts]
            there = tuple(part for part in parts if part is not None)
            if [part.dtype for part in there] != [dtype for _, dtype in form.parts]:
                continue
            shape = form.shape([part.shape for part in there])
            if shape is None:
                continue
            for part in there:
                del found[part.name]
            found[base] = StoredTensor(base, there[0].file, method, shape, there)
    return found


def read_values(tensor: StoredTensor, files: Mapping[Path, Any], box: Slices) -> "Tensor":
    """Return a part of a tensor's values.

    Args:
        files: opened by safetensors for torch.
    """
    parts = [files[part.file].get_slice(part.name) for part in tensor.parts or (tensor,)]
    values: Tensor = FORMATS[tensor.dtype].read(parts, box) if tensor.parts else parts[0][box]
    return values
