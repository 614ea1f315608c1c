"""The backward of attention on CPUs with AMX: gradients, bits, layouts, and the way without it."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from meshwright.models.layers import cpu_attention
from meshwright.models.layers.attention import CausalAttention
from meshwright.parallelisms.activation_checkpoint import _keeping
from meshwright.parallelisms.parallelize import _use_cpu_kernel
from tests.helpers.tiny import TINY, plain_model

REASON = cpu_attention.why_not(64)
has_kernel = pytest.mark.skipif(REASON != "", reason=REASON)
SOURCE = "cpu_attention.cpp"
FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu"


def heads(batch: int, num: int, length: int, width: int) -> Tensor:
    """(B, heads, S, H) as layers give them: (B, S, heads, H) in memory."""
    return torch.randn(batch, length, num, width).bfloat16().transpose(1, 2)


def inputs(
    batch: int = 2, num: int = 4, kv: int = 2, length: int = 140, width: int = 32
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    return [heads(batch, n, length, width) for n in (num, kv, kv, num)]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=is_grouped)


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cpu_attention.causal_attention(q, k, v, scale=0.2)


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return own(q, k, v).sin()


def gradients(attend, tensors: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    *qkv, grad = tensors
    leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
    return list(torch.autograd.grad(attend(*leaves), leaves, grad.to(dtype)))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm())


SHAPES = {  # B, N, K, S, H
    "whole blocks": (2, 4, 2, 256, 64),
    "odd": (1, 4, 1, 333, 32),
    "shorter than a block": (2, 2, 2, 17, 128),
    "one head of odd width": (1, 1, 1, 129, 48),
}


@has_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_against_fp64_are_no_larger_than_sdpas(shape) -> None:
    tensors = inputs(*SHAPES[shape])
    want = gradients(sdpa, tensors, torch.float64)
    for mine, theirs, exact in zip(
        gradients(own, tensors), gradients(sdpa, tensors), want, strict=True
    ):
        assert error(mine, exact) <= 1.05 * error(theirs, exact)
        assert error(mine, exact) < 2**-7 * exact.norm()
        assert mine.shape == exact.shape


@has_kernel
def test_one_position_has_no_gradient_of_scores() -> None:
    tensors = inputs(length=1)
    of_q, of_k, of_v = gradients(own, tensors)
    assert of_q.abs().max() < 0.05  # bf16 of delta and of dO V^T differ
    assert of_k.abs().max() < 0.05
    grouped = tensors[3].double().unflatten(1, (2, 2)).sum(2)
    assert torch.equal(of_v, grouped.bfloat16())


@has_kernel
def test_equal_bits_for_any_number_of_threads() -> None:
    tensors, before = inputs(3, 6, 3, 300, 64), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            found.append(gradients(own, tensors))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@has_kernel
def test_layout_of_inputs_does_not_matter() -> None:
    tensors = inputs()
    want = gradients(own, tensors)
    got = gradients(own, [x.contiguous() for x in tensors])
    assert all(map(torch.equal, want, got))
    by_columns = tensors[3].mT.contiguous().mT
    assert all(map(torch.equal, want, gradients(own, [*tensors[:3], by_columns])))
    expanded = torch.ones(()).bfloat16().expand_as(tensors[3])
    whole = gradients(own, [*tensors[:3], torch.ones_like(tensors[3])])
    assert all(map(torch.equal, whole, gradients(own, [*tensors[:3], expanded])))


@has_kernel
@pytest.mark.parametrize("place", range(4))
def test_nan_does_not_vanish(place) -> None:
    """`bad_steps` finds it in the gradients."""
    tensors = inputs()
    tensors[place][0, 1, 70, 3] = torch.nan
    assert any(not found.isfinite().all() for found in gradients(own, tensors))


@has_kernel
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_without_a_break_and_recomputed(mode) -> None:
    calls = []
    options = {"context_fn": _keeping((FORWARD,))} if mode == "selective" else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mode == "none":
            return layer(q, k, v)
        return checkpoint(layer, q, k, v, use_reentrant=False, preserve_rng_state=False, **options)

    def note(module, inputs):
        calls.append([f"{node.target} {node.args}" for node in module.graph.nodes])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    tensors = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    want = gradients(layer, tensors)
    assert all(map(torch.equal, gradients(compiled, tensors), want))
    assert all(map(torch.equal, gradients(attend, tensors), want))  # eager
    _, backward = calls
    again = sum(FORWARD in call for call in backward)  # maybe within one for a random state
    assert again == (mode == "full" and torch.__version__ >= "2.13")  # 2.11 keeps it
    assert sum("cpu_attention_backward.default" in call for call in backward) == 1


def test_only_heads_that_the_kernel_knows_go_to_it(monkeypatch) -> None:
    taken = []
    monkeypatch.setattr(
        cpu_attention, "causal_attention", lambda q, k, v, scale: taken.append(q) or q
    )
    core = CausalAttention()
    q, k, v, _ = inputs()
    core(q, k, v, scale=0.2)
    assert not taken  # nobody asked for it
    core.has_cpu_kernel = True
    core(q, k, v, scale=0.2)
    assert len(taken) == 1
    core(q.float(), k.float(), v.float(), scale=0.2)
    core(q, k, v, torch.ones(1, 1, 140, 140, dtype=torch.bool).tril(), scale=0.2)
    core(q[..., :24], k[..., :24], v[..., :24], scale=0.2)
    core(q, k, v[..., :16], scale=0.2)
    core(q.mT.contiguous().mT, k, v, scale=0.2)
    assert len(taken) == 1


@pytest.mark.parametrize("reason", ["", "of a test"])
def test_every_block_gets_it_or_none_and_the_log_says_so(monkeypatch, reason) -> None:
    widths = []
    monkeypatch.setattr(cpu_attention, "why_not", lambda width: widths.append(width) or reason)
    model = plain_model(TINY)
    line = _use_cpu_kernel(model)
    assert line == "backward of attention: " + ("torch's, since of a test" if reason else SOURCE)
    cores = [block.attention.core for block in model.layers.values()]
    assert [core.has_cpu_kernel for core in cores] == [not reason] * TINY.n_layers
    assert widths == [TINY.dim // TINY.n_heads]


def broken() -> None:
    raise RuntimeError("g++: not found\nmore")


FALLBACKS = {
    "compiler": ("_kernel", broken, "the kernel was not compiled: g++: not found"),
    "width": ("WIDTH_UNIT", 64, "the width of heads, 32, does not divide by 64"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_without_the_kernel_attention_is_torchs_and_a_line_says_why(monkeypatch, case) -> None:
    name, value, reason = FALLBACKS[case]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr(cpu_attention, name, value)
    cpu_attention.why_not.cache_clear()
    assert cpu_attention.why_not(32) == reason
    cpu_attention.why_not.cache_clear()


def test_a_cpu_without_amx_compiles_nothing(monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(cpu_attention, "_kernel", lambda: pytest.fail("compiled"))
    cpu_attention.why_not.cache_clear()
    assert cpu_attention.why_not(64) == "this CPU has no AMX"
    cpu_attention.why_not.cache_clear()


def test_only_heads_with_all_keys_are_taken() -> None:
    q, k = (torch.zeros(1, n, 8, 16, dtype=torch.bfloat16) for n in (4, 2))
    assert cpu_attention.takes(q, k, k)
    assert not cpu_attention.takes(q, k[:, :, :4], k[:, :, :4])
    assert not cpu_attention.takes(q[:, :3], k, k)
    assert not cpu_attention.takes(q, k, k[:, :1])
