"""Notes, of every operator on fake CUDA tensors, how it would keep the host waiting; and counts the
bytes that live on the device."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.commands.plan import torch_names
from tests.helpers.simulated_gpu import fake_cuda

aten = torch.ops.aten

READS_BACK = {
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default),
    *(aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default),
    *(aten._unique2.default, aten.repeat_interleave.Tensor),
}
"""Operators that bring a number from the device to the host."""
KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention_forward": "efficient",
    "flex_attention": "flex",
}


class Watch(TorchDispatchMode):
    """Within, host waits, copies and kernels are counted, and bytes from each `begin` on."""

    supports_higher_order_operators = True

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._live: dict[int, int] = {}  # storage -> bytes
        self._is_shadow, self._stack = False, ExitStack()
        self.now = 0
        self.begin()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile refuses to run within others."""
        return True

    def begin(self) -> None:
        """Begin to count anew."""
        self.peak = self.now
        self.blocking_copies: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        """Copies between host and device, by stream."""
        self.on_host: Counter[str] = Counter()
        """Tensors made in host memory."""
        self.collectives: Counter[str] = Counter()
        """Of tensor and context parallelism, whose collectives are functional."""
        fake_cuda.host_waits.clear()
        fake_cuda.kernels.clear()
        fake_cuda.stream_log.clear()

    def __enter__(self) -> Watch:
        self._stack.enter_context(torch_names.resizes_seen(self._resized))
        self._stack.enter_context(torch_names.shadows_marked(self._mark_shadow))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage._cdata in self._live:  # FSDP2 frees by it
            self._count(num_bytes - self._live[storage._cdata])
            self._live[storage._cdata] = num_bytes

    def _mark_shadow(self, is_shadow: bool) -> None:
        self._is_shadow = is_shadow  # of DTensor's: whole tensors that no GPU ever has

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self._count(-self._live.pop(key, 0))

    def _note_output(self, tensor: Tensor, operator: str) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fake:
            return
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
                self._count(storage.nbytes())
        elif tensor.device.type == "cpu" and tensor.dim() and tensor.numel():
            self.on_host[f"{operator} {tuple(tensor.shape)} at {fake_cuda.place()}"] += 1

    def _note_copy(self, source: Tensor, target: str, is_blocking: bool) -> None:
        if "meta" in (source.device.type, target) or source.device.type == target:
            return
        what = f"{source.device.type} to {target} {tuple(source.shape)} at {fake_cuda.place()}"
        self.copies[fake_cuda.current_stream().name] += 1
        # from memory that is not pinned, CUDA copies by way of a buffer that is
        if is_blocking or (target == "cuda" and not fake_cuda.is_pinned(source)):
            self.blocking_copies[what] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._is_shadow:
            return func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        name = packet.__name__
        if name in KERNELS:
            fake_cuda.kernels[KERNELS[name]] += 1
        if getattr(func, "namespace", "") == "_c10d_functional" and name != "wait_tensor":
            self.collectives[name] += 1
        if name == "exchange_counts":  # it copies splits to the host
            fake_cuda.host_waits[name] += 1
        if name.startswith("_fused_adam"):
            fake_cuda.stream_log.append(("updates", fake_cuda.current_stream().name))
        is_told = kwargs.get("output_size") is not None  # by the host, so the device is not asked
        if func in READS_BACK and isinstance(args[0], FakeTensor) and not is_told:
            if args[0].is_cuda:
                fake_cuda.host_waits[f"{name} at {fake_cuda.place()}"] += 1
            if func is aten._local_scalar_dense.default:
                return 1  # there is no number to read
        elif func is aten._to_copy.default and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"]).type
            self._note_copy(args[0], target, not kwargs.get("non_blocking", False))
        elif func is aten.copy_.default:
            is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self._note_copy(args[1], args[0].device.type, is_blocking)
        output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._note_output(leaf, name)
        return output
