"""Kernels of attention that give the logarithms of their sums, so that a caller may merge parts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.training import Training
from meshwright.models.sinks import differentiate_on_cpu, flash_on_cpu
from meshwright.models.table import DecoderSpec
from meshwright.system.hardware import choose_attention

LENGTH = 2
"""Of (B, N, S, H), the dimension of positions."""

WIDTHS = 8
"""Kernels of GPUs take heads whose width is a multiple of this."""

Part = tuple[Tensor, Tensor]
"""Attention to some of the keys: (B, N, queries, H), and its logarithms, (B, N, queries) fp32."""

Tensors = tuple[Tensor, ...]

aten = torch.ops.aten


def choose_kernel(
    table: DecoderSpec,
    device_type: str,
    length: int,
    training: Training,
    *,
    tp: int = 1,
    is_compared: bool,
) -> tuple[str | None, str]:
    """Return which of `KERNELS` takes chunks of `length` tokens on this process's device, or None,
    and a line for the log, or "".

    Args:
        tp: ranks that share the heads.
        is_compared: whether bits of gradients are compared between ranks, by the sentry.

    Raises:
        ConfigError: if this GPU hasn't the kernel of `training.attention_kernel` for such heads.
    """
    if device_type != "cuda":
        return "cpu", ""
    spec, wanted = table.plain_attention, training.attention_kernel
    if spec is None or training.mask_documents:  # masks are flex attention's
        return None, ""
    if is_compared and wanted == "auto":
        wanted = "flash"  # the gradients of cuDNN's aren't deterministic
    dtype = getattr(torch, training.mixed_precision_param)
    heads = spec.n_heads // tp, spec.n_kv_heads // tp, table.head_dim + -table.head_dim % WIDTHS
    chosen = choose_attention(wanted, torch.device(device_type), length, dtype, heads)
    return chosen.kernel if chosen.kernel in KERNELS else None, chosen.line


# Operators, since no public function of torch gives the logarithms on every device. Arguments by
# position: the compiler takes one called `out` for a place to write to.
def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Part:
    out, logarithms, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, is_causal=is_causal, scale=scale
    )
    return out, logarithms


def _flash_backward(tensors: Tensors, is_causal: bool, scale: float) -> Tensors:
    _, q, k, *_ = tensors
    lengths = None, None, q.shape[LENGTH], k.shape[LENGTH]
    # for dropout; without it nothing looks (flash_api.cpp, mha_bwd)
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, 0.0, is_causal, unused, unused, scale=scale
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Part:
    out, logarithms, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, is_causal=is_causal, scale=scale
    )
    return out, logarithms.squeeze(-1)


def _cudnn_backward(tensors: Tensors, is_causal: bool, scale: float) -> Tensors:
    *others, logarithms = tensors
    _, q, k, *_ = others
    # for dropout; without it nothing looks (MHA.cpp, run_cudnn_SDP_bprop)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    no_bias = no_lengths = None
    return aten._scaled_dot_product_cudnn_attention_backward(
        *(*others, logarithms.unsqueeze(-1), unused, unused, no_bias, no_lengths, no_lengths),
        *(q.shape[LENGTH], k.shape[LENGTH], 0.0, is_causal),
        scale=scale,
    )


class FusedKernel(NamedTuple):
    """Attention without a matrix of scores, which gives the logarithms."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], Part]
    """q, k, v, is_causal, scale -> output, logarithms of the sums of exponential scores."""
    backward: Callable[[Tensors, bool, float], Tensors]
    """(gradient of the output, q, k, v, output, logarithms), is_causal, scale -> gradients."""
    dtypes: tuple[torch.dtype, ...]


KERNELS = {
    "cpu": FusedKernel(flash_on_cpu, differentiate_on_cpu, (torch.float32, torch.bfloat16)),
    "flash": FusedKernel(_flash, _flash_backward, (torch.bfloat16,)),
    "cudnn": FusedKernel(_cudnn, _cudnn_backward, (torch.bfloat16,)),
}
"""Of CPUs, and those of GPUs by their names in `training.attention_kernel`."""
