"""Python's side of a CUDA device that is not there: streams, events, and the choice of a kernel.

Everything here replaces a name of torch in this process for good. Every wait of the host is noted.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import bias
from torch.nn.attention import flex_attention as flex

import meshwright
from meshwright.commands.plan.simulate import RMSNorm
from meshwright.commands.plan.torch_names import flex_attention_operator
from meshwright.models import attention
from meshwright.system.hardware import RIGHT_CUDNN

aten = torch.ops.aten

host_waits: Counter[str] = Counter()
"""Calls that make the host wait for a stream, an event or the device, by where they are."""
kernels: Counter[str] = Counter()
"""Calls of attention, by kernel: flash, efficient, math, flex."""
stream_log: list[tuple[str, str]] = []
"""(event, stream): what streams were told to wait for, in order."""
_streams: list[Stream] = []


def place() -> str:
    """The innermost line of this project that is running, else of torch."""
    return innermost([(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()])


def innermost(frames: Sequence[tuple[str, int]]) -> str:
    """File and line of the last of `frames` in our package, otherwise in torch's."""
    for package in (meshwright, torch):
        folder = Path(package.__file__).parent
        for file, line in reversed(frames):
            if Path(file).is_relative_to(folder) and "_python_dispatch" not in file:
                return f"{Path(file).relative_to(folder)}:{line}"
    return "?"


def _note_wait(what: str) -> None:
    host_waits[f"{what} at {place()}"] += 1


class Event:
    """torch.Event; recorded on the stream that was current then."""

    def __init__(self, *_: object, **__: object) -> None:
        self.stream = ""

    def record(self, stream: Stream | None = None) -> None:
        self.stream = (stream or current_stream()).name

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _note_wait("event.synchronize")

    def query(self) -> bool:
        return False


class Stream:
    """torch.Stream; `name` tells them apart."""

    device_type = 1
    device_index = 0
    _count = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = Stream._count
        self.name = f"stream {Stream._count}" if Stream._count else "default"
        Stream._count += 1

    def wait_stream(self, other: Stream) -> None:
        stream_log.append((f"waits for {other.name}", self.name))

    def wait_event(self, event: Event) -> None:
        stream_log.append((f"waits for {event.stream}", self.name))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _note_wait("stream.synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()


_default = Stream()


def current_stream(device: object = None) -> Stream:
    return _streams[-1] if _streams else _default


@contextlib.contextmanager
def _use(stream: Stream | None) -> Iterator[None]:
    with stream or contextlib.nullcontext():
        yield


class Properties:
    """Of an H100."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = 80 * 2**30
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_block, max_threads_per_multi_processor = 1024, 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    gcnArchName = ""  # noqa: N815  AMD's


class _Runtime:
    """torch.cuda.cudart()."""

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, *_: int) -> int:  # noqa: N802
        return 0


def install() -> None:
    """Make torch.cuda look present."""
    new: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "set_device": lambda device: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _default,
        "stream": _use,
        "synchronize": lambda device=None: _note_wait("cuda.synchronize"),
        "_lazy_init": lambda: None,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_properties": lambda device=None: Properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "cudart": _Runtime,
    }
    for name, value in new.items():
        setattr(torch.cuda, name, value)
    torch.backends.cudnn.version = lambda: RIGHT_CUDNN
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc]
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign]
    torch.Tensor.is_pinned = is_pinned  # type: ignore[method-assign]
    for module in (torch.backends.cuda, bias):
        module.SDPAParams = lambda *parts: parts
        for name in ("cudnn", "flash"):
            takes = lambda parts, debug=False: _takes_flash(*parts[:4])  # noqa: E731
            setattr(module, f"can_use_{name}_attention", takes)
        module.can_use_efficient_attention = lambda parts, debug=False: _takes_efficient(*parts[:2])
    F.scaled_dot_product_attention = _attention
    attention._compiled = _uncompiled
    if torch.version.cuda is None:  # such a build has no kernels: several operators do it
        F.rms_norm = RMSNorm.apply
        _kernels_of_gpu.impl("silu_backward", lambda grad, x: torch.empty_like(x), "CUDA")
    # torch's build for CUDA would allocate on it at the first fake tensor
    fake_tensor.init_gpu_context = lambda device: None
    _keep_meshes_real()


_kernels_of_gpu = torch.library.Library("aten", "IMPL")
_pinned: set[int] = set()


def _pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    pinned = tensor.clone()
    storage = pinned.untyped_storage()
    _pinned.add(storage._cdata)
    weakref.finalize(storage, _pinned.discard, storage._cdata)
    return pinned


def is_pinned(tensor: Tensor, device: object = None) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and mask is None and q.shape[-1] <= 256


def _takes_efficient(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] == k.shape[1]  # up to torch 2.13 no grouped heads


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention with the kernel that an H100 takes (sdp_utils.cpp; where it
    takes cuDNN's, flash attention stands for it), where no GPU can be asked."""
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not q.is_cuda:
        return _plain_attention(q, k, v, attn_mask, dropout_p, **options)
    if isinstance(attn_mask, bias.CausalBias):
        return attn_mask._dispatch(q, k, v, attn_mask, dropout_p, **options)
    if _takes_flash(q, k, v, attn_mask):
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    if _takes_efficient(q, k):
        if attn_mask is not None:  # of numbers, as torch makes of it
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:3], -1)
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    kernels["math"] += 1
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _uncompiled(function: Any) -> Any:
    """torch.compile does not run on fake tensors; flex attention is an operator without it, too."""
    return flex_attention_operator if function is flex.flex_attention else function


_plain_attention = F.scaled_dot_product_attention


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, outside fake tensors."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapped


def _keep_meshes_real() -> None:
    """Meshes are numbers on the host, also where they are made while tensors are fake."""
    names = ("__init__", "__getitem__", "get_coordinate", "_flatten", "_unflatten", "_concatenate")
    helpers = ("_get_mesh_tensor_from_full_mesh", "_compute_coordinate_on_dim")
    for name in (*names, *helpers):
        raw = DeviceMesh.__dict__.get(name)
        if isinstance(raw, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(raw)(real(raw.__func__)))
        elif raw is not None:
            setattr(DeviceMesh, name, real(raw))
