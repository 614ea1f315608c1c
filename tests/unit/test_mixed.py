"""Layers that compute in another type than that of their weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.layers import Embedding

TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("own", TYPES)
@pytest.mark.parametrize("dtype", [None, *TYPES])
@pytest.mark.parametrize("num_ids", [1, 7, 5000])
def test_an_embedding_is_as_if_its_table_were_cast(own, dtype, num_ids) -> None:
    """To the bit, whether tokens are rare or often in a batch; over two microbatches. Gradients of
    a token are added up in fp32, and rounded once."""
    torch.manual_seed(0)
    embedding = Embedding(5000, 8).to(own)
    embedding.dtype = dtype
    table = embedding.weight.detach().clone().requires_grad_()
    for _ in range(2):
        tokens = 5000 - num_ids + torch.randint(num_ids, (3, 700))
        vectors = embedding(tokens)
        want = F.embedding(tokens, table.detach().to(dtype or own))
        assert vectors.dtype == want.dtype
        assert torch.equal(vectors, want)
        grad = torch.randn(700, 3, 8).to(want.dtype).transpose(0, 1)
        vectors.backward(grad)
        in_fp32 = table.detach().float().requires_grad_()
        F.embedding(tokens, in_fp32).backward(grad.float())
        rounded = in_fp32.grad.to(want.dtype).to(own)
        table.grad = rounded if table.grad is None else table.grad + rounded
    assert embedding.weight.grad.dtype == own
    assert torch.equal(embedding.weight.grad, table.grad)


def test_a_frozen_table_asks_for_no_backward() -> None:
    embedding = Embedding(5, 8).requires_grad_(False)
    embedding.dtype = torch.bfloat16
    assert not embedding(torch.zeros(1, 3, dtype=torch.int64)).requires_grad


def test_a_table_with_memory_has_the_values_of_torchs() -> None:
    torch.manual_seed(3)
    own = Embedding(8, 4).weight
    torch.manual_seed(3)
    assert torch.equal(own, nn.Embedding(8, 4).weight)
