"""Sums of bf16 numbers are taken in fp32: in bf16, 256 + 1 is 256, and 2048 ones are 256.

Here are the sums of one process that aren't within a single matrix product of torch's. Those over
ranks and microbatches are in tests/distributed/test_precision.py, and of squares, for the gradient
norm, in test_gradients.py. All of them:

* gradients over ranks, those of norms and routers over tp included:
  `training.mixed_precision_reduce` (`prove`; test_precision.py)
* gradients over microbatches: float32 with float32 weights; otherwise `mixed_precision_reduce`,
  and `every_microbatch` is rejected without replicas (test_precision.py, test_memory.py)
* output weight's gradient over chunks of the loss: float32, rounded once (256, 1 and 1; 256 chunks
  of 8 tokens)
* exponentials over the vocabulary, losses of tokens: float32
* gradients of a token that occurs several times: float32, rounded once; with tp by torch's
  operator, which adds up in the compute type on CPUs
* gradient of a norm's weight over tokens, of an expert's weights and biases, results of a token's
  experts: float32 inside the kernel
* tokens per expert: int64 (test_mixture.py)
* router losses and metrics: float32
* squares of the gradient norm: float32, in parts (test_gradients.py)
* EMA of the weights: float32, whatever the weights are
* loss, gradient norm and metrics over ranks: float32; validation float64 (`prove`)
* activations and their gradients over tp and cp: compute type (bounds of bf16)
"""

import math

import pytest
import torch
from torch import Tensor

from meshwright.models import loss
from meshwright.models.layers import Embedding, RMSNorm
from meshwright.models.loss import SummedLoss
from meshwright.models.mixture import combine, grouped_matmul, inverse, spread
from meshwright.models.router import BalanceLosses, own_losses
from meshwright.parallelisms.local_model import LocalModel
from meshwright.train.optim.average import Average
from tests.helpers.tiny import plain_model

PARTS, WHOLE = (256.0, 1.0, 1.0), 258.0
MANY = 2048
DIM = 8


def rows_of(*values: float) -> Tensor:
    """(N, D) in bf16: each row has the same value everywhere."""
    return torch.tensor(values).bfloat16().unsqueeze(1).repeat(1, DIM)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_chunks_of_the_output_weights_gradient(is_compiled, monkeypatch) -> None:
    """If the gradient of every logit is 1, that of each row of W is the sum of the states."""

    def all_ones(self: SummedLoss, logits: Tensor, *_: Tensor) -> None:
        logits.fill_(1)

    monkeypatch.setattr(SummedLoss, "differentiate_", all_ones)
    chunk_tokens = 8
    summed = SummedLoss(chunk_tokens)
    if is_compiled:
        summed.compile("eager")
    of_tokens = (part / chunk_tokens for part in PARTS for _ in range(chunk_tokens))
    x = rows_of(*of_tokens).unsqueeze(0)
    weight = torch.zeros(5, DIM, dtype=torch.bfloat16, requires_grad=True)
    summed(x, weight, torch.zeros(x.shape[:2], dtype=torch.int64)).backward()
    assert {*weight.grad.flatten().tolist()} == {WHOLE}


def test_the_output_weights_gradient_of_256_chunks_of_8_tokens() -> None:
    """Three roundings are allowed: of the logits' gradient, of a chunk's product, of the sum."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 256 * 8, 64).bfloat16(), torch.randn(37, 64).bfloat16()
    labels = torch.randint(37, (1, 256 * 8))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        own = weight.to(dtype).requires_grad_()
        if dtype == torch.float64:
            logits = (x.to(dtype) @ own.T).flatten(0, 1)
            total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        else:
            total = SummedLoss(8)(x, own, labels)
        found += torch.autograd.grad(total, own)
    got, want = found
    assert (got - want).norm() < 3 * 2**-9 * want.norm()


@pytest.mark.parametrize("log_sums", [loss.log_sums, loss._log_sums_in_blocks])
def test_exponentials_of_logits(log_sums) -> None:
    logits = torch.zeros(3, MANY, dtype=torch.bfloat16)
    assert log_sums(logits).tolist() == pytest.approx([math.log(MANY)] * 3, rel=1e-6)


def test_losses_of_tokens() -> None:
    x = torch.zeros(1, MANY, DIM, dtype=torch.bfloat16)
    weight, labels = torch.zeros(3, DIM, dtype=torch.bfloat16), torch.zeros(1, MANY).long()
    assert SummedLoss(8)(x, weight, labels).item() == pytest.approx(MANY * math.log(3), rel=1e-6)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_gradients_of_a_tokens_vector(own) -> None:
    embedding = Embedding(4, DIM).to(own)
    embedding.dtype = torch.bfloat16
    embedding(torch.ones(1, 3, dtype=torch.int64)).backward(rows_of(*PARTS).unsqueeze(0))
    assert embedding.weight.grad[:, 0].tolist() == [0, WHOLE, 0, 0]


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_gradients_of_a_norms_weight(own) -> None:
    norm = RMSNorm(DIM, eps=0.0).to(own)
    norm(rows_of(*[1.0] * MANY)).backward(rows_of(*[1.0] * MANY))
    assert norm.weight.grad.tolist() == [MANY] * DIM


@pytest.mark.parametrize("is_offset", [False, True])
def test_a_norms_weight_in_fp32_counts_and_is_summed_as_fsdp2s_in_bf16(is_offset: bool) -> None:
    """One process has it in fp32: equal to ranks, it is rounded before use, and its gradient is."""
    found, x = [], torch.randn(1, 64, DIM, generator=torch.manual_seed(0)).bfloat16()
    for own in (torch.bfloat16, torch.float32):
        norm = RMSNorm(DIM, eps=0.0).to(own)
        norm.is_offset = is_offset
        with torch.no_grad():
            norm.weight.fill_(0.1003)
        y = norm(x)
        y.backward(x)
        found.append((y.tolist(), norm.weight.grad.tolist()))
    assert found[0] == found[1]


def test_gradients_of_an_experts_weight() -> None:
    x = rows_of(*[1.0] * MANY)
    ends = torch.tensor([MANY - 64, MANY], dtype=torch.int32)
    product = grouped_matmul(x.t().contiguous(), x, ends)
    assert [matrix.unique().tolist() for matrix in product] == [[MANY - 64], [64]]


def test_gradients_of_an_experts_bias_and_of_a_token_that_several_take() -> None:
    every, starts = torch.arange(3), torch.zeros(1, dtype=torch.int64)
    for place, begin in ((every, starts), (every.unsqueeze(0), None)):
        rows = torch.zeros(1, DIM, dtype=torch.bfloat16, requires_grad=True)
        spread(rows, torch.zeros(3, dtype=torch.int64), place, begin).backward(rows_of(*PARTS))
        assert {*rows.grad.flatten().tolist()} == {WHOLE}


def test_results_of_a_tokens_experts_and_gradients_of_their_weights() -> None:
    order, rows = torch.arange(3), rows_of(*PARTS)
    weights = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
    out = combine(rows, weights, order, inverse(order).view(1, 3))
    assert {*out.flatten().tolist()} == {WHOLE}
    long = torch.ones(3, MANY, dtype=torch.bfloat16)
    combine(long, weights, order, inverse(order).view(1, 3)).sum().backward()
    assert weights.grad.tolist() == [[MANY] * 3]


def test_a_routers_figures() -> None:
    """Of the squared logarithm of the sum of exponentials: 0.48 for two logits of 0."""
    logits = torch.zeros(MANY, 2)
    scores, load = logits.softmax(-1), torch.ones(2)
    _, figures = own_losses(logits, scores, BalanceLosses(z=1.0), load, None, None, is_softmax=True)
    assert figures.dtype == torch.float32
    assert figures[2].item() == pytest.approx(MANY * math.log(2) ** 2, rel=1e-6)


def test_an_average_of_bf16_weights() -> None:
    """Its steps are 1/1000 of the distance, which bf16 numbers of that size don't have."""
    model = plain_model().bfloat16()
    average = Average(LocalModel([model]), 0.999)
    for start, value in ((True, 256.0), (False, 512.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        average.begin() if start else [average.after_update(torch.tensor(False)) for _ in range(3)]
    for mean in average.tensors.values():
        assert mean.flatten()[0].item() == pytest.approx(512 - 256 * 0.999**3, rel=1e-6)
