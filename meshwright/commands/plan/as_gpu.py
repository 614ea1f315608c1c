"""The choices that the trainer makes by the device of its tensors, made on a CPU as on a GPU.

Fake tensors are on the CPU, because torch's CPU build has no others. Where the project's code or
torch asks for the device, this module puts in the answer of a GPU; the rest is the same code. The
test of the simulated GPU compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from meshwright.commands.plan.torch_names import below_autograd, flex_attention_operator
from meshwright.models import decoder, document_mask, loss
from meshwright.models.attention import repeat_heads
from meshwright.parallelisms import context_parallel
from meshwright.train.optim import gradients

aten = torch.ops.aten


BLOCK = 128
"""Queries, and keys, of a block of flex attention's masks: torch's default."""


_on_cpu = F.scaled_dot_product_attention


@contextmanager
def as_gpu() -> Iterator[None]:
    """Within, attention, norms, document masks, the gradient norm and the loss's blocks are a
    GPU's."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (gradients, "CPU_CHUNK", 1 << 60),  # GPUs take the norm of a whole gradient
        (F, "scaled_dot_product_attention", _attention),
        (F, "rms_norm", rms_norm),
        (context_parallel, "FLASH", {"cpu": context_parallel.FLASH["cuda"]}),
        (decoder, "build_mask", _block_mask),
        (document_mask, "flex_attention", flex_attention_operator),
        (loss, "BLOCKS", {"cpu": loss.BLOCKS["cuda"]}),
    )
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


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
    """Do `F.scaled_dot_product_attention` by the kernel of a GPU: flash attention for 16-bit types
    (cuDNN's, which newer GPUs take, keeps the same tensors), memory-efficient attention for fp32.
    """
    if attn_mask is not None:
        return _on_cpu(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.dtype == torch.float32:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, is_causal, False, scale=scale
    )[0]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Do `F.rms_norm` by the kernel of a GPU."""
    apply: Callable[..., Tensor] = _RMSNorm.apply
    return apply(x, shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """The kernel keeps its input and one number per row. CPUs have no such kernel: the operators in
    its place keep several tensors of the input's size in fp32 (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        with below_autograd():
            output, scale = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        of_x, of_weight = aten._fused_rms_norm_backward(
            grad, x, ctx.shape, scale, weight, [True, True]
        )
        return of_x, None, of_weight, None


def _block_mask(documents: Tensor, positions: Tensor | None = None) -> BlockMask:
    """Make a mask of the size of `document_mask.block_mask`, without the dense one that the
    compiler spares a GPU."""
    batch, keys = documents.shape
    queries = keys if positions is None else positions.shape[-1]
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    counts = documents.new_zeros(batch, 1, rows, dtype=torch.int32)
    indices = documents.new_zeros(batch, 1, rows, columns, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        counts.clone(),
        indices.clone(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, head, query, key: documents[b, query] == documents[b, key],
        seq_lengths=(queries, keys),
    )
