"""The sum of squares behind the gradient norm, where torch's own is not exact enough."""

import pytest
import torch
from torch import nn

from meshwright.parallelisms.gradients import local_square_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_is_exact_for_large_gradients(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.empty(n, dtype=dtype)) for n in (1 << 22, 3, 0)]
    parameters.append(nn.Parameter(torch.empty(5)))
    for parameter in parameters:
        parameter.grad = torch.randn(len(parameter), generator=generator).to(parameter.dtype)
    parameters.append(nn.Parameter(torch.empty(7)))  # without a gradient
    want = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)
    got = local_square_sum(parameters, torch.device("cpu"))
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(want, rel=1e-5)


def test_the_sum_goes_where_it_is_wanted() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    assert local_square_sum([parameter], torch.device("meta")).device.type == "meta"
