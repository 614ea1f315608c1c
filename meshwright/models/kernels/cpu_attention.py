"""Causal attention on CPUs by a kernel of ours (cpu_attention.cpp), forward and backward.

The kernel is compiled on the machine that runs it, by the compiler of torch.compile, into the cache
of torch.compile.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.models.kernels import library

SOURCE = Path(__file__).with_suffix(".cpp")


PRODUCTS = SOURCE.with_name("cpu_products.cpp")


FLAGS = (
    *("-ftree-loop-vectorize", "-fno-math-errno", "-ffp-contract=fast"),
    "-mprefer-vector-width=512",
)
"""Of the compiler, after inductor's, whose own code is written as vectors already."""


BF16_FLAG = "-mavx512bf16"
"""Of the compiler, where a CPU has these instructions: machines that share a cache stay apart."""


INSTRUCTIONS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16"),
    torch.float32: ("avx2",),
}
"""For each type that the kernel computes in, those of which a CPU needs one."""


WIDTH_UNIT = 16
"""Of the heads that the kernel takes."""


@cache
def why_not(width: int, dtype: torch.dtype) -> str:
    """Return the reason why this machine has no kernel for such heads; empty: it has."""
    if width % WIDTH_UNIT:
        return f"the width of heads, {width}, does not divide by {WIDTH_UNIT}"
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name, False) for name in INSTRUCTIONS[dtype]):
        names = " or ".join(name.upper().replace("_", "-") for name in INSTRUCTIONS[dtype])
        return f"this CPU has no {names}"
    try:
        is_usable = _kernel().is_usable(dtype == torch.float32)
    except Exception as error:
        return f"the kernel was not compiled: {library.first_line(error)}"
    return "" if is_usable else "torch and its compiler do not use this CPU's instructions for it"


@cache
def _kernel() -> ctypes.CDLL:
    """Compile the kernel, unless it lies in the cache of torch.compile, and load it."""
    has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    flags = (*FLAGS, BF16_FLAG) if has_bf16 else FLAGS
    text = PRODUCTS.read_text("utf-8") + SOURCE.read_text("utf-8")
    kernel = library.load(text, flags)
    kernel.attend.restype = kernel.differentiate.restype = ctypes.c_char_p
    return kernel


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel is made for such heads; arguments as `causal_attention`'s."""
    width = q.shape[-1]
    are_plain = all(x.is_cpu and x.dtype == q.dtype for x in (q, k, v)) and q.dtype in INSTRUCTIONS
    has_all_keys = q.shape[2] == k.shape[2] and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    return are_plain and has_all_keys and width == k.shape[-1] and width % WIDTH_UNIT == 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """(B, N, S, H), (B, K, S, H) twice -> (B, N, S, H); K divides N, and 16 divides H. All bf16, or
    all fp32."""
    out, _ = cpu_attention(q, k, v, scale)
    return out


# Operators, so that the compiler leaves their insides alone, and recomputation knows their names.
@torch.library.custom_op("meshwright::cpu_attention", mutates_args=())
def cpu_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, in the shape of q, and the logarithm of each query's sum of exponentials,
    (B, N, S) fp32; equal bits for any number of threads."""
    out, logsumexp = _outputs(q)
    _call(_kernel().attend, [q, k, v], [out], logsumexp, k.shape[1], scale)
    return out, logsumexp


@torch.library.custom_op("meshwright::cpu_attention_backward", mutates_args=())
def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes; equal bits for any number of threads.

    Args:
        grad: of `out`, (B, N, S, H).
        logsumexp: as `cpu_attention` gives it.
    """
    gradients = _like(q), _like(k), _like(v)
    inputs = [grad, q, k, v, out]
    _call(_kernel().differentiate, inputs, gradients, logsumexp.contiguous(), k.shape[1], scale)
    return gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *cpu_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None


# not by an autograd.Function, of which torch.compile's cache keeps no graph
cpu_attention.register_autograd(_differentiate, setup_context=_save)


@cpu_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@cpu_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _like(heads: Tensor) -> Tensor:
    """Empty, and as the layers beside attention have heads: (B, S, heads, H) in memory."""
    return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )


def _call(
    function: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    logsumexp: Tensor,
    num_kv_heads: int,
    scale: float,
) -> None:
    """Call a function of the kernel.

    Args:
        inputs: (B, heads, S, H) each; the first has all heads.

    Raises:
        RuntimeError: if it fails, for lack of memory.
    """
    heads = [*(x if x.stride(-1) == 1 else x.contiguous() for x in inputs), *outputs]
    strides = [stride for x in heads for stride in x.stride()[:3]]
    batch, num_heads, length, width = heads[0].shape
    sizes = batch, num_heads, num_kv_heads, length, width
    error = function(
        heads[0].dtype == torch.float32,
        (ctypes.c_void_p * len(heads))(*(x.data_ptr() for x in heads)),
        (ctypes.c_int64 * len(strides))(*strides),
        ctypes.c_void_p(logsumexp.data_ptr()),
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_float(scale),
    )
    if error is not None:
        raise RuntimeError(f"attention's kernel: {error.decode()}")
