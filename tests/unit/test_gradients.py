"""The sum of squares behind the gradient norm, where torch's own is not exact enough."""

import pytest
import torch
from torch import nn

from meshwright.train.optim.gradients import CPU_CHUNK, divisor_to_clip, local_square_sums


def square_sum(*parameters: nn.Parameter, device: str = "cpu") -> torch.Tensor:
    return local_square_sums((("", p) for p in parameters), (), torch.device(device))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_is_exact_for_large_gradients(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.empty(n, dtype=dtype)) for n in (1 << 22, 3, 0)]
    parameters.append(nn.Parameter(torch.empty(5)))
    for parameter in parameters:
        parameter.grad = torch.randn(len(parameter), generator=generator).to(parameter.dtype)
    parameters.append(nn.Parameter(torch.empty(7)))  # without a gradient
    want = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)
    got = square_sum(*parameters)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 2, *range(CPU_CHUNK - 1, CPU_CHUNK + 3), 2 * CPU_CHUNK + 2])
def test_no_element_is_left_out_where_chunks_meet(numel, dtype) -> None:
    parameter = nn.Parameter(torch.empty(numel, dtype=dtype))
    for place in {0, CPU_CHUNK - 1, CPU_CHUNK, numel - 1} & {*range(numel)}:
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[place] = 301 / 4  # the norm is no bf16 number
        got = square_sum(parameter).item()
        want = numel - 1 + parameter.grad[place].item() ** 2
        assert got == pytest.approx(want, rel=1e-5)


def test_a_rank_may_have_empty_shards_alone_and_the_sum_goes_where_it_is_wanted() -> None:
    parameter = nn.Parameter(torch.empty(0, 8))
    parameter.grad = torch.empty(0, 8)
    sums = local_square_sums([("output.weight", parameter)], ("output",), torch.device("cpu"))
    assert sums.tolist() == [0, 0]
    assert square_sum(parameter, device="meta").device.type == "meta"


def test_norms_of_groups_leave_the_whole_as_it_is() -> None:
    torch.manual_seed(0)
    names = ["tok_embeddings.weight", "layers.0.a", "layers.1.a", "layers.1.b", "norm.weight"]
    named = [(name, nn.Parameter(torch.empty(100_000))) for name in names]
    for _, parameter in named[1:]:  # the embedding is frozen
        parameter.grad = torch.randn(100_000)
    groups = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    got = local_square_sums(named, groups, torch.device("cpu"))
    assert torch.equal(got[0], square_sum(*(p for _, p in named)))
    norms = [0.0 if p.grad is None else p.grad.square().sum().item() for _, p in named]
    want = [norms[0], norms[1], norms[2] + norms[3], norms[4], 0.0]
    assert got[1:].tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("norm", [0.0, 0.5, 2.0, 300.0])
def test_the_divisor_clips_as_torch_does(norm: float) -> None:
    parameter = nn.Parameter(torch.empty(4))
    parameter.grad = torch.full((4,), norm / 2)
    ours = parameter.grad / divisor_to_clip(parameter.grad.norm(), 1.5)
    torch.nn.utils.clip_grad_norm_([parameter], 1.5)
    torch.testing.assert_close(ours, parameter.grad, rtol=2e-7, atol=0)
