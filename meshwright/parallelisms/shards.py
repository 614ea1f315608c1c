"""Tell DTensors and FSDP2's modules without importing their classes.

An eager job of one rank takes its first step without them, which saves 0.8 s. If a class was never
imported, no object is of it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Size, Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Placement
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    return isinstance(value, _classes("torch.distributed.tensor", "DTensor"))


def is_fsdp(module: object) -> TypeIs[FSDPModule]:
    """Return whether FSDP2 shards `module` as a group, or as one of a group's modules."""
    return isinstance(module, _classes("torch.distributed.fsdp", "FSDPModule"))


def _classes(module: str, name: str) -> type | tuple[()]:
    """Return the class, or none if no thread has finished the import of its module."""
    found: type | tuple[()] = getattr(sys.modules.get(module), name, ())
    return found


def local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of `value`, or all of it."""
    return value.to_local() if is_dtensor(value) else value


def has_layout_of(parameter: Tensor, value: Tensor) -> bool:
    """Return whether `value` has the shape of `parameter`, and is sharded as it is."""
    if is_dtensor(parameter):
        is_sharded_alike = is_dtensor(value) and value.placements == parameter.placements
        return is_sharded_alike and value.shape == parameter.shape
    return not is_dtensor(value) and value.shape == parameter.shape


def local_box(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of `parameter` (or all of it), and its offset in the whole."""
    if not is_dtensor(parameter):
        return parameter, (0,) * parameter.dim()
    # Private, used by torch's own checkpointing to the same end; no public name says where in
    # the full tensor a shard lies. If it moves, import it from where dcp's planner does.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


def part_of_box(whole: Tensor, box: Box) -> Tensor:
    """Return the view of `whole` that is its part `box`."""
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


@functools.lru_cache(maxsize=64)  # layers are alike, and torch takes 0.3 s to tell of 512 ranks
def boxes_of_ranks(
    size: Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Mapping[int, Box]:
    """Return the part of a DTensor that each rank of its mesh holds, by global rank."""
    # As private as `local_box`'s: that one tells of this rank alone. Without it, ranks would have
    # to tell each other, in a collective.
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found = dict[int, Box]()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        shape, offset = _compute_local_shape_and_global_offset(
            size, mesh.shape, list(coordinate), placements
        )
        found[int(mesh.mesh[coordinate])] = (tuple(offset), tuple(shape))
    return found
