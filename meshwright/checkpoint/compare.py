"""Differences between the tensors of two checkpoints, of any meshes; one pair in memory at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.saved_tensors import SavedTensor
from meshwright.checkpoint.weights import CheckpointWeights

CHUNK = 1 << 20
"""Elements that are in float64 at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """Between two tensors of one shape."""

    name: str
    count: int
    """Elements that differ in any bit."""
    numel: int
    largest: float
    """Of |a - b|; infinite where one is not a number."""
    relative: float
    """Largest of |a - b| / max(|a|, |b|)."""
    index: tuple[int, ...]
    """Where |a - b| is largest."""
    a: float
    """The element there."""
    b: float


def compare_tensors(
    a: CheckpointWeights, b: CheckpointWeights, names: Mapping[str, SavedTensor]
) -> Iterator[TensorDifference | None]:
    """For each of `names`, which both have in one shape and type: their difference, if any.

    Raises:
        ConfigError: if one cannot be read.
    """
    for name in names:
        yield _compare(name, a.read(name), b.read(name))


def _compare(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    count, largest, relative, place = 0, -1.0, 0.0, 0
    flat_a, flat_b = a.flatten(), b.flatten()
    for start in range(0, a.numel(), CHUNK):
        some_a, some_b = flat_a[start : start + CHUNK], flat_b[start : start + CHUNK]
        differ = _bits_differ(some_a, some_b)
        if not (unequal := int(differ.sum())):
            continue
        count += unequal
        # only the differing elements: 0 and -0, or two kinds of NaN, are 0 apart
        wide_a, wide_b = some_a[differ].double(), some_b[differ].double()
        apart = (wide_a - wide_b).abs()
        apart[(wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
        apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        scale = torch.maximum(wide_a.abs(), wide_b.abs())
        ratio = torch.where(apart == 0, 0.0, apart / scale).nan_to_num_(nan=torch.inf)
        relative = max(relative, float(ratio.max()))
        where = int(apart.argmax())
        if float(apart[where]) > largest:
            largest = float(apart[where])
            place = start + int(differ.nonzero()[where])
    if not count:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
    values = float(flat_a[place]), float(flat_b[place])
    return TensorDifference(name, count, a.numel(), largest, relative, index, *values)


def _bits_differ(a: Tensor, b: Tensor) -> Tensor:
    """By element, whether any bit does."""
    size = a.element_size()
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, size).any(dim=1)
