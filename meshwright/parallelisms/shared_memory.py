"""FSDP2's all-gathers and reduce-scatters among CPU ranks of one machine, through shared memory.

gloo sends through sockets even on one machine. Here each rank writes its part of a tensor where the
others read it, and they wait for each other once. FSDP2 copies parameters into the tensor that it
gathers, and out of it, in any case; so a gather copies nothing of its own.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallelisms.shards import is_fsdp

SPARE_SLOTS = 8
"""More than FSDP2 has tensors of collectives at a time, besides those that are gathered early."""


def share_memory(model: nn.Module, mesh: DeviceMesh, ahead: int) -> bool:
    """Let every FSDP group of `model` over a mesh communicate through memory. Collective.

    Args:
        mesh: of FSDP2 for these groups; its last axis cuts the parameters.
        ahead: groups that are gathered before they are needed.

    Returns:
        Whether they do: CPU ranks of gloo do that can map memory of each other.
    """
    if mesh.size(-1) == 1 or mesh.device_type != "cpu":
        return False
    group = mesh.get_group(mesh.ndim - 1)
    if dist.get_backend(group) != "gloo":
        return False
    # the most that a gradient in fp32 takes on all ranks, padded; the first has the largest shards
    groups = [own for own in fsdp_groups(model) if own.mesh_info.shard_process_group == group]
    if not groups:  # a stage without experts
        return False
    parameters = ([own.sharded_param for own in of_group.fsdp_params] for of_group in groups)
    rows = (
        sum(one.to_local().numel() + math.prod(one.shape[1:]) for one in some)
        for some in parameters
    )
    largest = group.size() * max(rows)
    slot_bytes = -(-4 * group.size() * largest // mmap.PAGESIZE) * mmap.PAGESIZE
    slots = open_slots(group, SPARE_SLOTS + ahead, slot_bytes)
    if slots is None:
        return False
    gather, scatter = AllGather(slots), ReduceScatter(slots)
    for own in groups:
        # Any objects with these methods will do. FSDP2's setters reject modules of two groups
        # (2.13). If the names are gone, gloo is used: slower, and to the same results.
        own._all_gather_comm, own._reduce_scatter_comm = gather, scatter
    return True


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters: of a module that it shards there is one for each mesh."""
    for module in model.modules():
        if is_fsdp(module):
            # Nothing public reaches them. If a name is gone, this raises.
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # not in torch 2.11
            groups = [state._fsdp_param_group] if groups is None else groups
            yield from (group for group in groups if group is not None)


def open_slots(group: dist.ProcessGroup, count: int, slot_bytes: int) -> Slots | None:
    """Return memory that all ranks of `group` share; None if they can't. Collective.

    It is a file without a name, so nothing remains of it when the last rank ends, in whatever way.
    The first rank's `slot_bytes` count. A page takes memory once it is written.
    """
    offer = _make_file(count, slot_bytes) if group.rank() == 0 else None
    offers = [offer]
    dist.broadcast_object_list(offers, group=group, group_src=0)
    memory = _open(offers[0]) if offers[0] is not None else None
    is_shared = torch.tensor(memory is not None, dtype=torch.int64)
    dist.all_reduce(is_shared, dist.ReduceOp.MIN, group=group)
    if offer is not None:
        os.close(offer.number)
    return Slots(memory, group) if memory is not None and is_shared else None


class File(NamedTuple):
    """A file without a name, of the process that made it."""

    process: int
    number: int
    """Its descriptor there."""
    token: bytes
    """Random, at its start, by which others know it."""
    shape: tuple[int, int]
    """Number of slots, and bytes of each."""


def _make_file(count: int, slot_bytes: int) -> File | None:
    try:
        number = os.memfd_create("meshwright")
    except (AttributeError, OSError):  # not Linux, or forbidden
        return None
    file = File(os.getpid(), number, secrets.token_bytes(16), (count, slot_bytes))
    try:
        os.truncate(number, count * slot_bytes)
        os.pwrite(number, file.token, 0)
    except OSError:  # files may not be so large
        os.close(number)
        return None
    return file


def _open(file: File) -> NDArray[np.uint8] | None:
    try:  # on another node the path leads to nothing, or to a different file
        with open(f"/proc/{file.process}/fd/{file.number}", "r+b") as opened:
            if opened.read(len(file.token)) != file.token:
                return None
            memory = mmap.mmap(opened.fileno(), math.prod(file.shape))
            return np.frombuffer(memory, np.uint8).reshape(file.shape)
    except (OSError, ValueError):
        return None


class Slots:
    """Memory for tensors of collectives: on all ranks of `group` the same places."""

    def __init__(self, memory: NDArray[np.uint8], group: dist.ProcessGroup) -> None:
        self.group = group
        self._memory = memory
        self._users: list[weakref.ref[NDArray[np.uint8]] | None] = [None] * len(memory)

    def take(self, num_bytes: int) -> Tensor:
        """Return bytes of the first slot that no rank uses."""
        count, slot_bytes = self._memory.shape
        if num_bytes > slot_bytes or None not in self._users:
            raise RuntimeError(f"{num_bytes} bytes do not fit in {count} slots of {slot_bytes}")
        index = self._users.index(None)
        array = self._memory[index, :num_bytes]
        self._users[index] = weakref.ref(array)  # all tensors in it share one storage, and it
        return torch.from_numpy(array)

    def meet(self, tensor: Tensor) -> None:
        """Wait until each rank has written its part of `tensor`. Collective.

        A slot is free if its tensor was gone on every rank when this started. So all ranks have the
        same free slots, and none writes what another still reads.
        """
        size = tensor.numel() * tensor.itemsize
        gone = [user is not None and user() is None for user in self._users]
        own = torch.tensor([size, *gone])
        every = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(every, own, group=self.group)  # quicker than gloo's all-reduce
        sizes, *are_gone = torch.stack(every, 1).tolist()
        if {*sizes} != {size}:
            raise RuntimeError(f"ranks differ in a tensor of FSDP2: {sizes} bytes")
        for index, votes in enumerate(are_gone):
            if all(votes):
                self._users[index] = None


class AllGather:
    """FSDP2's all-gather; see `torch.distributed.fsdp.FSDPModule.set_custom_all_gather`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor to gather into, of one dimension; FSDP2 writes this rank's part."""
        return self._slots.take(size[0] * dtype.itemsize).view(dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Wait for the parts of the others."""
        self._slots.meet(output_tensor)


class ReduceScatter:
    """FSDP2's reduce-scatter; see `torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._summands: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor to sum, of one dimension; after it, one for this rank's part of the
        sum."""
        if self._summands is not None:
            return torch.empty(size, dtype=dtype, device=device)
        ranks = self._slots.group.size()
        whole = self._slots.take(ranks * size[0] * dtype.itemsize).view(dtype)
        self._summands = whole.view(ranks, -1)
        return self._summands[self._slots.group.rank()]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Add up this rank's part of every rank's tensor, in the order of ranks."""
        assert self._summands is not None
        assert op == dist.ReduceOp.SUM
        summands, self._summands = self._summands, None
        self._slots.meet(summands)
        parts = summands.view(group.size(), group.size(), -1)[:, group.rank()]
        torch.sum(parts, 0, out=output_tensor)
