"""A matmul of rows with one of several matrices each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

ALIGNMENT = 16
"""Bytes: torch's grouped matmul takes rows whose stride is a multiple (2.13)."""


GROUPED_TYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
"""Types that torch multiplies in groups, by device."""


# torch's own, under a name that compiles and is traced in fp32 too: its shape rule takes bf16 alone
# (2.13)
@torch.library.custom_op("meshwright::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(R, in), (E, out, in) -> (R, out): rows up to ends[0] by weight[0], and so on.

    Args:
        ends: (E,) int32, ascending; the last is R.
    """
    if _is_grouped(rows, weight.shape[1], weight.shape[2]):
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    parts = rows.split(_sizes(ends))
    return torch.cat([part @ own.t() for part, own in zip(parts, weight, strict=True)])


@torch.library.custom_op("meshwright::grouped_matmul_backward", mutates_args=())
def grouped_matmul_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by rows and weight; an expert without rows has a gradient of zeros."""
    grad = grad.contiguous()  # an expanded one, as of a sum, is refused
    if _is_grouped(rows, weight.shape[1], weight.shape[2]):
        of_rows = F.grouped_mm(grad, weight, offs=ends)
        return of_rows, F.grouped_mm(grad.t(), rows, offs=ends)
    sizes = _sizes(ends)
    grads, parts = grad.split(sizes), rows.split(sizes)
    of_rows = torch.cat([part @ own for part, own in zip(grads, weight, strict=True)])
    of_weight = [own.t() @ part for own, part in zip(grads, parts, strict=True)]
    return of_rows, torch.stack(of_weight)


def _is_grouped(rows: Tensor, *sizes: int) -> bool:
    """Return whether torch multiplies such rows in groups; otherwise a loop does, to equal
    results."""
    is_aligned = all(size * rows.itemsize % ALIGNMENT == 0 for size in sizes)
    has_type = rows.dtype in GROUPED_TYPES.get(rows.device.type, ())
    return is_aligned and has_type and hasattr(F, "grouped_mm")


def _sizes(ends: Tensor) -> list[int]:
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


@grouped_matmul.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_matmul_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_matmul_backward(grad, *ctx.saved_tensors), None


grouped_matmul.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.grouped_matmul)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.meshwright.grouped_matmul_backward)
def _backward_flops(
    grad: tuple[int, ...], rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * _flops(rows, weight)
