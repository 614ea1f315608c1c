"""Causal attention on CPUs with AMX, whose backward is a kernel of ours (cpu_attention.cpp).

Forward is torch's flash attention. The kernel is compiled on the machine that runs it, by the
compiler of torch.compile, into the cache of torch.compile.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    *("-ftree-loop-vectorize", "-fno-math-errno", "-ffp-contract=fast"),
    "-mprefer-vector-width=512",
)
"""Of the compiler, after inductor's, whose own code is written as vectors already."""


WIDTH_UNIT = 16
"""Of the heads that the kernel takes."""


@cache
def why_not(width: int) -> str:
    """Return the reason why this machine has no kernel for heads of that width; empty: it has."""
    if width % WIDTH_UNIT:
        return f"the width of heads, {width}, does not divide by {WIDTH_UNIT}"
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        return "this CPU has no AMX"
    try:
        is_usable = _kernel().is_usable()
    except Exception as error:  # no compiler, no headers, a full disk, or other torch inside
        return f"the kernel was not compiled: {next(iter(str(error).splitlines()), repr(error))}"
    return "" if is_usable else "torch's matrix products do not use AMX"


@cache
def _kernel() -> ctypes.CDLL:
    """Compile the kernel, unless it lies in the cache of torch.compile, and load it."""
    # private: inductor's own way from C++ to a library, with its lock between processes. If it
    # changes, `why_not` says so, and attention is torch's.
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.codecache import CppCodeCache  # not at import, which would take a second

    try:
        # without its trial of the compiler, for which it starts a process and imports torch: the
        # kernel, with the same flags, is one
        with config.patch({"cpp.vec_isa_ok": True}):
            library = CppCodeCache.load(SOURCE.read_text("utf-8"), extra_flags=FLAGS)
    except Exception:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()  # it has taken the trial for done
        raise
    assert isinstance(library, ctypes.CDLL)
    return library


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel is made for such heads; arguments as `causal_attention`'s."""
    width = q.shape[-1]
    # forward wants rows of one piece
    are_plain = all(x.is_cpu and x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (q, k, v))
    has_all_keys = q.shape[2] == k.shape[2] and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    return are_plain and has_all_keys and width == k.shape[-1] and width % WIDTH_UNIT == 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """(B, N, S, H), (B, K, S, H) twice -> (B, N, S, H); K divides N, and 16 divides H. bf16."""
    out: Tensor = _Attention.apply(q, k, v, scale)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # the operator of F.scaled_dot_product_attention on CPUs: recomputation knows its name
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *cpu_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None


# An operator, so that the compiler leaves its insides alone.
@torch.library.custom_op("meshwright::cpu_attention_backward", mutates_args=())
def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes; equal bits for any number of threads.

    Args:
        grad: of `out`, (B, N, S, H).
        logsumexp: of the scores of each query, (B, N, S) fp32.
    """
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out)]
    gradients = [_like(x) for x in (q, k, v)]
    heads, logsumexp = [*inputs, *gradients], logsumexp.contiguous()
    strides = [stride for x in heads for stride in x.stride()[:3]]
    batch, num_heads, length, width = q.shape
    sizes = batch, num_heads, k.shape[1], length, width
    _kernel().backward(
        (ctypes.c_void_p * len(heads))(*(x.data_ptr() for x in heads)),
        (ctypes.c_int64 * len(strides))(*strides),
        ctypes.c_void_p(logsumexp.data_ptr()),
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_float(scale),
    )
    return gradients[0], gradients[1], gradients[2]


@cpu_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(heads: Tensor) -> Tensor:
    """Empty, and as the layers beside attention have heads: (B, S, heads, H) in memory."""
    return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
        1, 2
    )
