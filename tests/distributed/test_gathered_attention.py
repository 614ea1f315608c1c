"""Attention to gathered keys: that to the whole sequence, by kernels that need no mask."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallelisms.context_parallel import (
    FLASH,
    attend,
    attend_in_chunks,
    gradients_in_chunks,
    has_flash_attention,
    local_positions,
)
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.tiny import meshes_of

SEQ_LEN, SCALE = 32, 8**-0.5


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values of grouped heads, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, SEQ_LEN, 8) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.ranks("cp")
def test_it_is_attention_to_the_whole_sequence(cp, dtype, tolerance) -> None:
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    *inputs, grad = _inputs(dtype)
    positions = local_positions(SEQ_LEN, mesh, grad.device)
    whole = [part.float().requires_grad_() for part in inputs]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wants = [expected, *torch.autograd.grad(expected, whole, grad.float())]
    own = [part[:, :, positions].requires_grad_() for part in inputs]
    output = attend(*own, scale=SCALE, mesh=mesh)
    gets = [output, *torch.autograd.grad(output, own, grad[:, :, positions])]
    for name, got, want in zip("oqkv", gets, wants, strict=True):
        assert got.dtype == dtype
        want = want[:, :, positions]
        error = ((got.float() - want).norm() / want.norm()).item()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.ranks(4)
def test_a_rank_keeps_its_own_keys_alone() -> None:
    """Eager or compiled, which give the same bits."""
    cp = 4
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    *inputs, grad = _inputs(torch.bfloat16)
    positions, sizes = local_positions(SEQ_LEN, mesh, grad.device), []

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, scale=SCALE, mesh=mesh)

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    results = []
    for attention in (eager, torch.compile(eager, backend="aot_eager", fullgraph=True)):
        own = [part[:, :, positions].requires_grad_() for part in inputs]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = attention(*own)
        results.append([output, *torch.autograd.grad(output, own, grad[:, :, positions])])
    assert max(sizes) <= 2 * 4 * (SEQ_LEN // cp) * 8  # queries: whole keys have twice as many
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("rank", [0, 1])
def test_there_is_neither_a_mask_nor_a_matrix_of_scores(rank: int) -> None:
    q, k, v = (torch.randn(1, 4, n, 8) for n in (256, 512, 512))
    chunks = (rank, 3 - rank)
    with Shapes() as shapes:
        output, sums = attend_in_chunks(q, k, v, chunks, SCALE)
        gradients_in_chunks(output, q, k, v, output, sums, chunks, SCALE)
    assert shapes.most <= k.numel()  # a mask of the second chunk has 128 x 512 elements
    parts = 3 + (rank > 0)  # of four, one has no key
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    assert shapes.calls[forward] == shapes.calls[f"{forward}_backward"] == parts


def test_torch_is_asked_whether_there_is_a_kernel(monkeypatch) -> None:
    asked = []

    def can_use(params: torch.backends.cuda.SDPAParams) -> bool:
        asked.append((params.query.dtype, params.query.shape[-1], params.is_causal))
        return params.query.dtype == torch.bfloat16

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use)
    empty = torch.empty  # of no GPU
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **(k | {"device": "cpu"})))
    assert has_flash_attention("cuda", torch.bfloat16, 48)
    assert not has_flash_attention("cuda", torch.float32, 48)
    assert has_flash_attention("cuda", torch.bfloat16, 20)
    widths = [(torch.bfloat16, 48), (torch.float32, 48), (torch.bfloat16, 24)]
    assert asked == [(dtype, width, True) for dtype, width in widths]
    assert has_flash_attention("cpu", torch.float32, 48)


def test_kernels_of_gpus_take_these_arguments() -> None:
    """Without a GPU: names, types and shapes."""
    with FakeTensorMode():
        for keys, is_causal in ((16, True), (48, False)):
            shapes = [(2, 4, 16, 64), (2, 2, keys, 64), (2, 2, keys, 64)]
            q, k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
            out, logsumexp, *_ = FLASH["cuda"].forward(q, k, v, is_causal=is_causal, scale=SCALE)
            assert out.shape == q.shape
            assert (logsumexp.shape, logsumexp.dtype) == (q.shape[:-1], torch.float32)
            tensors = out, q, k, v, out, logsumexp
            gradients = FLASH["cuda"].backward(tensors, is_causal, SCALE)
            assert [grad.shape for grad in gradients] == shapes
