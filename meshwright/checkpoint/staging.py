"""Copies a rank's tensors to host memory, so that training continues while they are written."""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.parallelisms.shards import local_shard
from meshwright.system.log import logger

ALIGNMENT = 64  # bytes, of a cache line

Layout = dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...]]]
"""Type, shape and strides of each copy."""


def _lay_out(local: Mapping[str, Tensor]) -> Layout:
    # strides as a clone's: a tensor without gaps keeps its strides
    likes = {name: torch.empty_like(tensor, device="meta") for name, tensor in local.items()}
    return {name: (like.dtype, like.shape, like.stride()) for name, like in likes.items()}


class Staging:
    """Memory for one copy, taken at the first save and used again for every other.

    It is pinned where there is a CUDA device.
    """

    def __init__(self) -> None:
        self._layout: Layout = {}
        self._memory: mmap.mmap | None = None
        self._is_pinned = False
        self.tensors: dict[str, Tensor] = {}
        """The copies, by name."""
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []

    def preallocate(self, state: Mapping[str, Tensor]) -> None:
        """Take the memory for a copy of `state`: slow the first time, so not for a step to do."""
        self._allocate(_lay_out({name: local_shard(tensor) for name, tensor in state.items()}))
        for tensor in self.tensors.values():
            tensor.zero_()  # the system gives pages when they are touched

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of `state`, as it is at this point of the device's work.

        Returns before a device has done so: see `wait`. The device copies during its other work,
        so `hold_update` has to be called before `state` changes.
        """
        local = {name: local_shard(tensor) for name, tensor in state.items()}
        layout = _lay_out(local)
        if layout != self._layout:
            self._allocate(layout)
        self._copied = []
        for device in {tensor.device for tensor in local.values()}:
            with torch.no_grad(), self._beside_its_work(device):
                for name, tensor in local.items():
                    if tensor.device == device:
                        self.tensors[name].copy_(tensor, non_blocking=True)

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

        The host doesn't wait.
        """
        for event in self._copied:
            if not event.query():
                event.wait(torch.accelerator.current_stream())

    def wait(self) -> None:
        """Wait until the copies of `take` may be read."""
        for event in self._copied:
            event.synchronize()

    def _allocate(self, layout: Layout) -> None:
        """Give every copy a place in the memory, one after the other."""
        sizes = (shape.numel() * dtype.itemsize for dtype, shape, _ in layout.values())
        *offsets, total = accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0)
        total = max(total, 1)  # a rank may have empty shards only
        self.tensors, self._layout = {}, layout
        if self._memory is None or total != len(self._memory):
            self._take_memory(total)
        for (name, (dtype, shape, stride)), offset in zip(layout.items(), offsets, strict=True):
            if count := shape.numel():
                # its storage is exactly as long as it, as torch.save wants it
                flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
                self.tensors[name] = flat.as_strided(shape, stride)
            else:
                self.tensors[name] = torch.empty(shape, dtype=dtype)

    def _take_memory(self, num_bytes: int) -> None:
        if self._memory is not None and self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(self._memory))
        self._memory = mmap.mmap(-1, num_bytes)
        self._is_pinned = torch.cuda.is_available() and _pin(self._memory)


def _pin(memory: mmap.mmap) -> bool:
    if not int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)):
        return True
    logger.warning("%d bytes could not be pinned: copies are slower", len(memory))
    with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel would fail with it
        torch.zeros(1, device="cuda")
    return False


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
