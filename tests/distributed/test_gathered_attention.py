"""The cores of attention against the formula, with sinks and without: alone, with kept keys, and
with keys gathered over ranks, by kernels that need no mask."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.models.attention import CausalAttention, dense_mask
from meshwright.models.generation import CachedAttention
from meshwright.parallelisms.context_parallel import (
    attend,
    attend_in_chunks,
    gradients_in_chunks,
    key_positions,
)
from meshwright.parallelisms.fused_attention import KERNELS
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.sequence_parts import local_positions
from tests.helpers.operators import Operators
from tests.helpers.slow import slow
from tests.helpers.tiny import meshes_of

SEQ_LEN, HEADS, KV_HEADS = 32, 4, 2
SCALE = 0.3  # not H^-1/2
SINKS = torch.tensor([-2.0, 0.1, 1.0, 6.0])
"""Of the heads: that take almost nothing of a softmax, and almost all."""


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of grouped heads, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, SEQ_LEN, 8, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    window: int = SEQ_LEN,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """The formula."""
    seen = torch.ones(SEQ_LEN, SEQ_LEN).tril().bool() if mask is None else mask
    seen = seen.triu(1 - window)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = SCALE * q @ k.transpose(2, 3)
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    exponentials = scores.masked_fill(~seen, -torch.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.view(-1, 1, 1).exp()
    return exponentials / total @ v


WINDOWS = (1, 2, 3, 4, 5, 8, 9, 16, 31, 32, 33)
"""Of chunks of 4 and 8 tokens, and of sequences: one less, as many, and one more."""


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_one_device_and_generation_are_the_formula(window, sinks) -> None:
    """The prompt is longer than the window, or shorter; kept keys are no more than it."""
    q, k, v, _ = inputs()
    want = plain(q, k, v, sinks, window=window or SEQ_LEN)
    core = functools.partial(CausalAttention(), sinks=sinks, scale=SCALE, window=window)
    torch.testing.assert_close(core(q, k, v), want)
    for prompt in (3, 20):
        cached = CachedAttention(SEQ_LEN)
        core = functools.partial(cached, sinks=sinks, scale=SCALE, window=window)
        parts = [slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, SEQ_LEN))]
        got = [core(*(x[:, :, part] for x in (q, k, v))) for part in parts]
        torch.testing.assert_close(torch.cat(got, dim=2), want)
        assert cached._keys.shape[2] == min(window or SEQ_LEN, SEQ_LEN)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 27, [0] * 32])


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("is_masked", [False, True])
def test_gradients_with_sinks_are_the_formulas(is_masked, window, soft_cap) -> None:
    """On one device, of documents too; with soft caps, as GPUs generate, by a matrix of scores."""
    *leaves, grad = [*inputs()[:3], SINKS, inputs()[3]]
    mask = dense_mask(DOCUMENTS, None, window) if is_masked else None
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    wanted = plain(*exact, mask, window or SEQ_LEN, soft_cap)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    q, k, v, sinks = leaves
    options = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
    output = CausalAttention()(q, k, v, mask, sinks, **options)
    gets = [output, *torch.autograd.grad(output, leaves, grad)]
    wants = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
    for name, got, want in zip("oqkvs", gets, wants, strict=True):
        assert (got - want).abs().max() <= 1e-6 * want.abs().max(), name


@contextmanager
def cudnn_on_cpu() -> Iterator[None]:
    """cuDNN's operators, computed by the CPU's kernel."""

    def forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *_, scale):
        assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0)
        out, logarithms = KERNELS["cpu"].forward(q, k, v, is_causal, scale)
        unused = torch.zeros((), dtype=torch.int64)
        lengths = q.shape[2], k.shape[2]
        return out, logarithms.unsqueeze(-1), unused, unused, *lengths, unused, unused, unused

    def backward(grad, q, k, v, out, logarithms, *others, scale):
        *_, max_q, max_k, dropout_p, is_causal = others
        assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0)
        tensors = grad, q, k, v, out, logarithms.squeeze(-1)
        return KERNELS["cpu"].backward(tensors, is_causal, scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("cp", [2, 4, *slow(8)])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.ranks("cp")
def test_gathered_keys_are_attention_to_the_whole_sequence(cp, sinks) -> None:
    """With and without a kernel and a mask; in bf16 up to rounding. Windows end within a chunk, at
    its ends, and several chunks before."""
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    positions = local_positions(SEQ_LEN, mesh, torch.device("cpu"))
    for case in (
        (torch.float32, "cpu", False, None),
        (torch.float32, None, False, None),
        (torch.float32, "cpu", True, None),
        (torch.bfloat16, "cpu", False, None),
        (torch.bfloat16, "cudnn", False, None),
        *((torch.float32, "cpu", False, window) for window in WINDOWS),
        *((torch.float32, "cpu", True, window) for window in WINDOWS),
        (torch.bfloat16, "cpu", False, 5),
    ):
        dtype, kernel, is_masked, window = case
        *given, grad = inputs(dtype)
        places = key_positions(window, SEQ_LEN, grad.device, mesh=mesh)
        masks = (dense_mask(DOCUMENTS), dense_mask(DOCUMENTS, positions, window, places))
        whole_mask, own_mask = masks if is_masked else (None, None)
        whole = [part.float().requires_grad_() for part in given]
        own = [part[:, :, positions].requires_grad_() for part in given]
        of_heads = [] if sinks is None else [sinks.clone().requires_grad_()]
        expected = plain(*whole, *(of_heads or [None]), whole_mask, window or SEQ_LEN)
        wants = [expected, *torch.autograd.grad(expected, [*whole, *of_heads], grad.float())]
        options = {"scale": SCALE, "window": window, "mesh": mesh, "kernel": kernel}
        with cudnn_on_cpu():
            output = attend(*own, own_mask, *(of_heads or [None]), **options)
            gets = [output, *torch.autograd.grad(output, [*own, *of_heads], grad[:, :, positions])]
        for of_sinks in gets[4:]:  # of this rank's queries
            dist.all_reduce(of_sinks, group=mesh.get_group())
        for name, got, want in zip("oqkvs", gets, wants, strict=False):
            assert got.dtype == (torch.float32 if name == "s" else dtype)
            want = want if name == "s" else want[:, :, positions]
            # with W = 1 and no sinks, the gradients of queries and keys are zero
            is_zero = window == 1 and sinks is None and name in "qk"
            error = (got.float() - want).norm() / (grad.float() if is_zero else want).norm()
            # a rounding of the value, and one of each rank's part of a sum
            bound = 1e-6 if dtype == torch.float32 else (1 + cp) * 2**-9
            assert error < bound, f"{case}, {name}: {error}"


@pytest.mark.parametrize("is_compiled", [False, *slow(True)])
@pytest.mark.ranks(4)
def test_a_rank_keeps_its_own_keys_alone(is_compiled) -> None:
    """Eager or compiled, which give the same bits."""
    cp = 4
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    *given, grad = inputs(dtype=torch.bfloat16)
    positions, sizes = local_positions(SEQ_LEN, mesh, grad.device), []

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, scale=SCALE, mesh=mesh)

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    results = []
    kinds = [eager]
    if is_compiled:
        kinds.append(torch.compile(eager, backend="aot_eager", fullgraph=True))
    for attention in kinds:
        own = [part[:, :, positions].requires_grad_() for part in given]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = attention(*own)
        results.append([output, *torch.autograd.grad(output, own, grad[:, :, positions])])
    assert max(sizes) <= 2 * 4 * (SEQ_LEN // cp) * 8  # queries: whole keys have twice as many
    assert all(map(torch.equal, results[0], results[-1]))


@pytest.mark.parametrize("rank", [0, 1])
def test_there_is_neither_a_mask_nor_a_matrix_of_scores(rank: int) -> None:
    q, k, v = (torch.randn(1, 4, n, 8) for n in (256, 512, 512))
    chunks = (rank, 3 - rank)
    sizes: list[int] = []
    with Operators(lambda *call: sizes.extend(map(torch.numel, call[-1]))) as operators:
        output, sums = attend_in_chunks(q, k, v, chunks, SCALE, "cpu")
        gradients_in_chunks(output, q, k, v, output, sums, chunks, SCALE, "cpu")
    assert max(sizes) <= k.numel()  # a mask of the second chunk has 128 x 512 elements
    parts = 3 + (rank > 0)  # of four, one has no key
    forward = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert operators.counts[forward] == operators.counts[f"{forward}_backward"] == parts


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_kernels_of_gpus_take_these_arguments(kernel: str) -> None:
    """Without a GPU: names, types and shapes."""
    forward, backward, (dtype,) = KERNELS[kernel]
    with FakeTensorMode():
        for keys, is_causal in ((16, True), (48, False)):
            shapes = [(2, 4, 16, 64), (2, 2, keys, 64), (2, 2, keys, 64)]
            q, k, v = (torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes)
            out, logsumexp = forward(q, k, v, is_causal, SCALE)
            assert out.shape == q.shape
            assert (logsumexp.shape, logsumexp.dtype) == (q.shape[:-1], torch.float32)
            gradients = backward((out, q, k, v, out, logsumexp), is_causal, SCALE)
            assert [grad.shape for grad in gradients] == shapes
