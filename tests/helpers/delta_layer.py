"""Inputs of a core of linear attention, and what it makes of them."""

from collections.abc import Callable

import torch
from torch import Tensor

BATCH, SEQ, TAPS, KEY_HEADS, HEADS, K, V = 2, 40, 4, 2, 4, 16, 24


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = 2 * KEY_HEADS * K + HEADS * V
    decay = -torch.rand(BATCH, SEQ, HEADS, generator=generator)
    strength = draw(BATCH, SEQ, HEADS).sigmoid()
    return [draw(BATCH, SEQ, width).to(dtype), draw(width, TAPS), decay, strength.to(dtype)]


def several_documents() -> Tensor:
    """The last of the first row and the first of the second have the same number."""
    starts = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    starts[0, [5, 6, 30]] = 1
    starts[1, [0, 1, 2, 20]] = torch.tensor([3, 1, 1, 1])
    return starts.cumsum(1)


def results(
    core: Callable[..., Tensor], given: list[Tensor], documents: Tensor | None
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = core(*leaves, documents, value_dim=V, key_dim=K)
    assert out.dtype == torch.float32
    loss = (out.square() * torch.arange(1, SEQ + 1, device=out.device).view(-1, 1, 1)).sum()
    return [out, *torch.autograd.grad(loss, leaves)]
