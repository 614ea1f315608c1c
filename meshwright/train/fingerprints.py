"""Sums of the bits of weights and of optimizer state: equal on any mesh where every bit is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.parameter import block_of
from meshwright.parallelisms.shards import is_dtensor, local_shard

WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type that shows the bits of an element, by its bytes."""

CPU_CHUNK = 1 << 15
"""Elements that stay in a CPU's cache between two sums of 32 bits, which are exact for so many."""


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of each element, read as a whole number: () int64.

    Sums of whole numbers are exact in any order, and they wrap around at 2^64.
    """
    bits = tensor.detach().contiguous().view(WHOLE_NUMBERS[tensor.dtype.itemsize]).flatten()
    if bits.device.type != "cpu":
        return bits.sum(dtype=torch.int64)
    return torch.tensor(_cpu_sum(bits.numpy()))


def _cpu_sum(bits: npt.NDArray[Any]) -> int:
    """Return the sum of whole numbers. torch and numpy convert 32 bits to 64 before they add, which
    takes longer than to add the upper halves, and all, in 32 bits."""
    if bits.itemsize != 4:
        return int(bits.sum(dtype=np.int64))
    total, buffer = 0, np.empty(min(len(bits), CPU_CHUNK), np.int32)
    for start in range(0, len(bits), CPU_CHUNK):
        chunk = bits[start : start + CPU_CHUNK]
        upper = np.right_shift(chunk, 16, out=buffer[: len(chunk)])
        high = int(upper.sum(dtype=np.int32)) << 16
        # the lower halves aren't negative, and add up to less than 2^32
        total += high + (int(chunk.sum(dtype=np.int32)) - high) % (1 << 32)
    return total


def fingerprints(
    parameters: Iterable[tuple[str, nn.Parameter]],
    state: Mapping[Tensor, Mapping[str, object]],
    groups: Sequence[str],
    device: torch.device,
) -> dict[str, list[str]]:
    """Return the sums of bits of weights and of optimizer state of each group of parameters, over
    all ranks, as 16 hexadecimal digits. Collective. Waits for the device. Arguments as of
    `local_sums`."""
    sums = local_sums(parameters, state, groups, device)
    dist.all_reduce(sums)
    weights, of_state = ([f"{total % 2**64:016x}" for total in row] for row in sums.tolist())
    return {"weights": weights, "optimizer": of_state}


def local_sums(
    parameters: Iterable[tuple[str, nn.Parameter]],
    state: Mapping[Tensor, Mapping[str, object]],
    groups: Sequence[str],
    device: torch.device,
) -> Tensor:
    """Return this rank's share of the sums of bits of weights, and of optimizer state: (2, G).

    Args:
        parameters: each once over the ranks of a pipeline, with its name.
        state: of the optimizer, by parameter.
        groups: every `block_of` a parameter of the model.
        device: of collectives.
    """
    places, parts = list[int](), list[Tensor]()
    for name, parameter in parameters:
        is_first, group = is_first_copy(parameter), groups.index(block_of(name))
        if is_first:
            places.append(group)
            parts.append(bit_sum(local_shard(parameter)).to(device))
        for value in state.get(parameter, {}).values():
            # a count of steps has no dimensions, and every rank has it
            if not (isinstance(value, Tensor) and value.dim()):
                continue
            # of an optimizer of whole matrices, one rank of all has the state
            if is_first or not is_dtensor(value):
                places.append(len(groups) + group)
                parts.append(bit_sum(local_shard(value)).to(device))
    sums = torch.zeros(2 * len(groups), dtype=torch.int64, device=device)
    if parts:
        sums.index_add_(0, torch.tensor(places, device=device), torch.stack(parts))
    return sums.view(2, -1)


def is_first_copy(parameter: Tensor) -> bool:
    """Return whether no other rank counts the same shard of the parameter."""
    if not is_dtensor(parameter):
        return True
    place = parameter.device_mesh.get_coordinate()
    assert place is not None  # this rank holds a shard
    pairs = zip(place, parameter.placements, strict=True)
    return all(index == 0 for index, placement in pairs if placement.is_replicate())
