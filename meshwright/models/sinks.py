"""Attention sinks: a logit of each head that takes part in the softmax, but has no value.

With l the logarithm of a query's sum of exponential scores, and s the sink of its head, the sum has
l' = log(exp(l) + exp(s)), so sinks multiply the output by exp(l - l'). Any kernel that returns l
can have them. And its own backward, given the output and the logarithm with sinks, returns the
gradients with sinks: of a score it needs exp(score - l') and output times gradient, no more.

Source: OpenAI 2025, arXiv:2508.10925, section 2.2; Miller 2023, "Attention is off by one".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of attention and its logarithms with sinks, from those without.

    Args:
        out: (B, N, S, H).
        log_sums: (B, N, S) fp32, of the sums of exponential scores.
        sinks: (N,) fp32.
    """
    joint = torch.logaddexp(log_sums, sinks.unsqueeze(-1))
    return (out * (log_sums - joint).exp().unsqueeze(-1)).type_as(out), joint


def gradient_of_sinks(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, (N,) fp32: minus each one's weight in the softmaxes times the
    product of output and gradient.

    Args:
        grad: of `out`.
        out, log_sums: of `with_sinks`.
    """
    weights = (sinks.unsqueeze(-1) - log_sums).exp()
    return -(weights * (grad.float() * out).sum(-1)).sum((0, 2)).type_as(sinks)


aten = torch.ops.aten


# Operators, since no public function of torch gives the logarithms.
def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention on CPUs, (B, N, queries, H), and its logarithms, (B, N, queries).

    Args:
        mask: what is added to scores.
    """
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, log_sums


def differentiate_on_cpu(
    tensors: tuple[Tensor, ...], is_causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v.

    Args:
        tensors: the gradient of the output, q, k, v, the output and its logarithms.
    """
    of_qkv: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return of_qkv


class _FlashAttention(torch.autograd.Function):
    """Flash attention on CPUs, with sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        out, log_sums = flash_on_cpu(q, k, v, is_causal, scale, mask)
        out, log_sums = with_sinks(out, log_sums, sinks)
        ctx.save_for_backward(q, k, v, sinks, mask, out, log_sums)
        ctx.options = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, mask, out, log_sums = ctx.saved_tensors
        is_causal, scale = ctx.options
        tensors = grad, q, k, v, out, log_sums
        of_qkv = differentiate_on_cpu(tensors, is_causal, scale, mask)
        return *of_qkv, gradient_of_sinks(grad, out, log_sums, sinks), None, None, None


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
) -> Tensor:
    """(B, N, queries, H), (B, K, keys, H) twice -> (B, N, queries, H), on CPUs.

    Args:
        mask: bool, of the keys that a query sees; None: all, or with `is_causal` those before.
        sinks: (N,) fp32.
    """
    if mask is not None:  # the operator takes what is added to scores
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    apply: Callable[..., Tensor] = _FlashAttention.apply
    return apply(q, k, v, sinks, mask, is_causal, scale)
