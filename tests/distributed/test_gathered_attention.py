"""Attention to gathered keys: that to the whole sequence, by kernels that need no mask."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.attention import repeat_heads
from meshwright.parallelisms import ring_attention
from meshwright.parallelisms.context_parallel import (
    attend,
    gather,
    gathered_attention,
    local_positions,
)
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.tiny import meshes_of

SEQ_LEN = 32


def _inputs(dtype: torch.dtype, width: int = 8) -> list[torch.Tensor]:
    """Queries, keys and values of grouped heads, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, SEQ_LEN, width) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _whole(inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of attention to the whole sequence, in fp32."""
    whole = [part.float().requires_grad_() for part in inputs]
    output = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    return [output, *torch.autograd.grad(output, whole, grad.float())]


def _check(gets: list[torch.Tensor], wants: list[torch.Tensor], tolerance: float) -> None:
    for name, got, want in zip("oqkv", gets, wants, strict=True):
        error = ((got.float() - want).norm() / want.norm()).item()
        assert error < tolerance, f"{name}: {error}"


class Shapes(TorchDispatchMode):
    """Calls of operators, and the most elements that one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        if isinstance(output, torch.Tensor):
            self.most = max(self.most, output.numel())
        return output


def _attend_to_the_whole(cp: int, dtype: torch.dtype, tolerance: float) -> None:
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    *inputs, grad = _inputs(dtype)
    positions = local_positions(SEQ_LEN, mesh, grad.device)
    own = [part[:, :, positions].requires_grad_() for part in inputs]
    scale = inputs[0].shape[-1] ** -0.5
    output = attend(*own, scale=scale, mesh=mesh, ring=None)
    gets = [output, *torch.autograd.grad(output, own, grad[:, :, positions])]
    assert all(got.dtype == dtype for got in gets)
    _check(gets, [want[:, :, positions] for want in _whole(inputs, grad)], tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("cp", [2, 4])
def test_it_is_attention_to_the_whole_sequence(on_ranks, cp, dtype, tolerance) -> None:
    on_ranks(cp, _attend_to_the_whole, cp, dtype, tolerance)


def _kept_and_results(cp: int, compiles: bool) -> tuple[int, bool]:
    """Most elements of a tensor that is kept for backward; whether keys that were gathered before
    give the same bits."""
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    *inputs, grad = _inputs(torch.bfloat16)
    positions = local_positions(SEQ_LEN, mesh, grad.device)
    rank, sizes = mesh.get_local_rank(), []
    chunks = (rank, 2 * cp - 1 - rank)

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    def once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = gather(torch.stack([k, v]), mesh).unbind(0)
        return gathered_attention(q, k, v, chunks)

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gathered_attention(q, k, v, chunks, mesh=mesh)

    results = []
    for attention in (once, torch.compile(twice, backend="aot_eager") if compiles else twice):
        own = [part[:, :, positions].requires_grad_() for part in inputs]
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = attention(*own)
        results.append([output, *torch.autograd.grad(output, own, grad[:, :, positions])])
    return max(sizes), all(map(torch.equal, *results))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_rank_keeps_its_own_keys_alone(on_ranks, compiles) -> None:
    cp = 4
    queries = 2 * 4 * (SEQ_LEN // cp) * 8
    for most, are_equal in on_ranks(cp, _kept_and_results, cp, compiles):
        assert most <= queries  # whole keys have twice as many elements
        assert are_equal


@pytest.mark.parametrize("rank", [0, 1])
def test_there_is_neither_a_mask_nor_a_matrix_of_scores(rank: int) -> None:
    q, k, v = (torch.randn(1, 4, n, 8, requires_grad=True) for n in (256, 512, 512))
    with Shapes() as shapes:
        gathered_attention(q, k, v, (rank, 3 - rank)).sum().backward()
    assert shapes.most <= k.numel()  # a mask of the second chunk has 128 x 512 elements
    parts = 3 + (rank > 0)  # of four, one has no key
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    assert shapes.calls[forward] == shapes.calls[f"{forward}_backward"] == parts


def _efficient(q, k, v, bias, has_sums, dropout, is_causal, scale):
    """Memory-efficient attention's own interface, by a formula: no grouped heads, padded sums."""
    assert (bias, has_sums, dropout) == (None, True, 0.0)
    assert q.shape[1] == k.shape[1]
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        assert q.shape == k.shape
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    sums = F.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=math.inf)
    return scores.softmax(-1) @ v, sums, None, None


def _efficient_backward(grad, q, k, v, bias, out, sums, seed, offset, dropout, mask, causal, scale):
    assert (bias, dropout, mask) == (None, 0.0, [True, True, True, False])
    assert grad.stride(-1) == 1
    assert sums.shape[-1] % 32 == 0
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    chances = (scores - sums[..., : q.shape[2], None]).exp()
    of_scores = chances * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, chances.transpose(-1, -2) @ grad, None


class _Operators:
    """In the place of torch.ops.aten."""

    @staticmethod
    def _scaled_dot_product_efficient_attention(*args, scale):
        return _efficient(*args, scale)

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(*args, scale):
        return _efficient_backward(*args, scale)


@pytest.mark.parametrize("width", [8, 12])
def test_what_memory_efficient_attention_is_given_and_gives(monkeypatch, width: int) -> None:
    """In fp32 on a GPU; here its interface stands for it."""
    monkeypatch.setattr(ring_attention, "aten", _Operators)
    *inputs, grad = _inputs(torch.float32, width)
    wants, cp = _whole(inputs, grad), 2
    gets = [torch.zeros_like(want) for want in wants]
    length = SEQ_LEN // (2 * cp)
    for rank in range(cp):
        chunks = (rank, 2 * cp - 1 - rank)
        own = torch.cat([torch.arange(c * length, (c + 1) * length) for c in chunks])
        q, k, v = (part.clone().requires_grad_() for part in inputs)
        output = gathered_attention(q[:, :, own], k, v, chunks, is_flash=False)
        gets[0][:, :, own] = output.detach()
        for got, of_rank in zip(
            gets[1:], torch.autograd.grad(output, (q, k, v), grad[:, :, own]), strict=True
        ):
            got += of_rank
    _check(gets, wants, 1e-6)


def test_heads_are_repeated_as_the_kernels_group_them() -> None:
    q, k, v, _ = _inputs(torch.float32)
    grouped = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = repeat_heads(k, 4), repeat_heads(v, 4)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), grouped)
