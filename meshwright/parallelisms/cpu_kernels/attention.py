"""Causal attention on CPUs by our kernel (attention.cpp), forward and backward.

The kernel is compiled on the machine that runs it, by the compiler of torch.compile, into the cache
of torch.compile.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.attention import Mask
from meshwright.models.decoder import Decoder
from meshwright.models.sinks import gradient_of_sinks, with_sinks

SOURCES = [Path(__file__).with_name(name) for name in ("products.cpp", "attention.cpp")]
"""Compiled as one file."""

FLAGS = [
    "-ftree-loop-vectorize",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-mprefer-vector-width=512",
]
"""Of the compiler, after inductor's, whose own code is written as vectors already."""

BF16_FLAG = "-mavx512bf16"
"""Of the compiler, where a CPU has these instructions: nodes that share a cache stay apart."""

INSTRUCTIONS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float32: ("avx2",)}
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
        first_line = next(iter(str(error).splitlines()), repr(error))
        return f"the kernel was not compiled: {first_line}"
    return "" if is_usable else "torch and its compiler do not use this CPU's instructions for it"


@cache
def _kernel() -> ctypes.CDLL:
    """Compile the kernel, unless its library lies in the cache of torch.compile, and load it."""
    # private: inductor's own way from C++ to a library, with its lock between processes. If it
    # changes, jobs go without the kernel, and the log says why.
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.codecache import CppCodeCache  # not at import, which would take a second

    flags = [*FLAGS]
    if torch.cpu.get_capabilities().get("avx512_bf16", False):
        flags.append(BF16_FLAG)
    # the cache knows text and commands, not what a different torch's headers make of them
    text = "".join([f"// torch {torch.__version__}\n", *(path.read_text() for path in SOURCES)])
    try:
        # without its trial of the compiler, for which it starts a process and imports torch: this
        # text, with the same flags, is one
        with config.patch({"cpp.vec_isa_ok": True}):
            kernel = CppCodeCache.load(text, extra_flags=flags)
    except Exception:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()  # it has taken the trial for done
        raise
    assert isinstance(kernel, ctypes.CDLL)
    kernel.attend.restype = kernel.differentiate.restype = ctypes.c_char_p
    return kernel


def apply_cpu_attention(model: Decoder, dtype: torch.dtype) -> str:
    """Give every block of `model` the kernel, in place, if all ranks have it. Collective. Return a
    line for the log.

    Args:
        model: whose attention has no masks, before its first step.
        dtype: that it computes in.
    """
    if reason := _of_any_rank(why_not(model.table.head_dim, dtype)):
        return f"attention: torch's, since {reason}"
    attentions = model.table.attentions.items()
    specs = {str(layer): spec for layer, spec in attentions if str(layer) in model.layers}
    if all(spec.has_own_core for spec in specs.values()):
        return "attention: the model's own"
    if all(spec.soft_cap is not None for spec in specs.values()):
        return "attention: plain products, since no kernel for CPUs has soft caps"
    for name, spec in specs.items():
        if spec.soft_cap is None and not spec.has_own_core:
            core = model.layers[name].get_submodule("attention.core")
            core.forward = attend  # one for all blocks, so that they share a graph
    return f"attention: {SOURCES[-1].parent.name}/{SOURCES[-1].name}"


def _of_any_rank(reason: str) -> str:
    """Return the first reason that a rank of the job has; empty if none has one. Collective."""
    if not dist.is_initialized() or dist.get_backend() != "gloo":  # a plan, or one rank in a test
        return reason
    reasons = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((f"{why} (rank {rank})" for rank, why in enumerate(reasons) if why), "")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Keep the contract of `CausalAttention`, without masks and soft caps: all bf16, or all
    fp32."""
    assert mask is None
    assert soft_cap is None
    length = q.shape[2]
    out, _ = cpu_attention(q, k, v, sinks, scale, min(window or length, length))
    return out


# Operators, so that the compiler doesn't look inside, and recomputation knows their names.
@torch.library.custom_op("meshwright::cpu_attention", mutates_args=())
def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return the output, in the shape of q, and the logarithm of each query's sum of exponentials,
    (B, N, S) fp32; equal bits for any number of threads.

    Args:
        sinks: (N,) fp32; None: there are none.
        window: tokens that a token sees, with itself: at least 1, at most S.
    """
    out, logsumexp = _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    _call(_kernel().attend, [q, k, v], [out], logsumexp, k.shape[1], scale, window)
    return (out, logsumexp) if sinks is None else with_sinks(out, logsumexp, sinks)


@torch.library.custom_op("meshwright::cpu_attention_backward", mutates_args=())
def cpu_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes; equal bits for any number of threads.

    Args:
        grad: of `out`, (B, N, S, H).
        logsumexp: as `cpu_attention` gives it.
    """
    gradients = _like(q), _like(k), _like(v)
    inputs, logsumexp = [grad, q, k, v, out], logsumexp.contiguous()
    _call(_kernel().differentiate, inputs, gradients, logsumexp, k.shape[1], scale, window)
    return gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, logsumexp, sinks = ctx.saved_tensors
    of_qkv = cpu_attention_backward(grad, *tensors, out, logsumexp, ctx.scale, ctx.window)
    of_sinks = None if sinks is None else gradient_of_sinks(grad, out, logsumexp, sinks)
    return *of_qkv, of_sinks, None, None


# not by an autograd.Function, of which torch.compile's cache keeps no graph
cpu_attention.register_autograd(_differentiate, setup_context=_save)


@cpu_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@cpu_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(heads: Tensor) -> Tensor:
    """Empty, and as the layers next to attention have heads: (B, S, heads, H) in memory."""
    found = torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format)
    return found.transpose(1, 2)


def _call(
    function: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    logsumexp: Tensor,
    num_kv_heads: int,
    scale: float,
    window: int,
) -> None:
    """Call a function of the kernel with (B, heads, S, H) each; the first has all heads."""
    heads = [*(x if x.stride(-1) == 1 else x.contiguous() for x in inputs), *outputs]
    strides = [stride for x in heads for stride in x.stride()[:3]]
    batch, num_heads, length, width = heads[0].shape
    sizes = batch, num_heads, num_kv_heads, length, width, window
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
