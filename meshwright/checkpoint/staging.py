"""A copy of a rank's tensors in host memory, from which a checkpoint is written while training
continues."""

import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.parallelisms.shards import is_dtensor
from meshwright.system.log import logger

ALIGNMENT = 64  # bytes, of a cache line


@dataclass(frozen=True)
class BufferSlice:
    """Where in the memory a tensor is."""

    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """Return the tensor there; its storage is exactly as long as it, as torch.save wants it."""
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        count = self.num_bytes // self.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided(self.shape, self.stride)


Layout = dict[str, BufferSlice]


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[Layout, int]:
    """Return a place for each, one after the other, and the bytes that all take."""
    # strides as a clone's: a tensor without gaps keeps its strides
    likes = [torch.empty_like(tensor, device="meta") for tensor in tensors.values()]
    sizes = (-(-like.nbytes // ALIGNMENT) * ALIGNMENT for like in likes)
    *offsets, total = accumulate(sizes, initial=0)
    return {
        name: BufferSlice(offset, like.dtype, tuple(like.shape), like.stride())
        for name, offset, like in zip(tensors, offsets, likes, strict=True)
    }, total


def _local(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each."""
    return {k: v.to_local() if is_dtensor(v) else v for k, v in state.items()}


class Staging:
    """Memory for one copy, taken at the first save and used again for every other.

    It is pinned where there is a CUDA device.
    """

    def __init__(self) -> None:
        self.layout: Layout = {}
        self.num_bytes = 0
        self._memory: mmap.mmap | None = None
        self.tensors: dict[str, Tensor] = {}
        """The copies, by name."""
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []

    def preallocate(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory for a copy of `state`: slow the first time, so not for a step to do."""
        layout, num_bytes = _lay_out(_local(state))
        self._allocate(layout, num_bytes)
        for tensor in self.tensors.values():
            tensor.zero_()  # the system gives pages when they are touched

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of `state`, as it is at this point of the device's work.

        Returns before a device has done so: see `wait`. The device copies beside its other work,
        so `hold_update` has to be called before `state` changes.
        """
        local = _local(state)
        layout, num_bytes = _lay_out(local)
        if layout != self.layout:
            self._allocate(layout, num_bytes)
        by_device: dict[torch.device, list[str]] = defaultdict(list)
        for name, tensor in local.items():
            by_device[tensor.device].append(name)
        self._copied = []
        for device, names in by_device.items():
            with torch.no_grad(), self._beside_its_work(device):
                for name in names:
                    self.tensors[name].copy_(local[name], non_blocking=True)

    @contextmanager
    def _beside_its_work(self, device: torch.device) -> Iterator[None]:
        """Within, `device` works in a stream for copies, after all its work so far."""
        if device.type == "cpu":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            yield
        self._copied.append(stream.record_event())

    def hold_update(self) -> None:
        """Keep the device's work from here on, in the current stream, until copies are made.

        The host does not wait.
        """
        for event in self._copied:
            if not event.query():
                event.wait(torch.accelerator.current_stream())

    def wait(self) -> None:
        """Wait until the copies of `take` may be read."""
        for event in self._copied:
            event.synchronize()

    def _allocate(self, layout: Layout, num_bytes: int) -> None:
        self.tensors = {}
        if self._memory is None or num_bytes != self.num_bytes:
            if self._memory is not None and torch.cuda.is_available():
                torch.cuda.cudart().cudaHostUnregister(_address(self._memory))
            self._memory = mmap.mmap(-1, max(num_bytes, 1))  # a rank may have empty shards alone
            if torch.cuda.is_available():
                address = _address(self._memory)
                if int(torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 0)):
                    logger.warning("%d bytes could not be pinned: copies are slower", num_bytes)
        memory = self._memory
        self.tensors = {name: place.tensor(memory) for name, place in layout.items()}
        self.layout, self.num_bytes = layout, num_bytes


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
