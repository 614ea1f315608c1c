"""Attention's kernel on CPUs: output, gradients, bits, layouts, and the way without it."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from meshwright.config.parallelism import SAVED_OPS
from meshwright.parallelisms import parallelize as compile_cache
from meshwright.parallelisms.activation_checkpoint import _keeping
from meshwright.parallelisms.cpu_kernels import attention as cpu_attention
from tests.helpers.tiny import TINY, lines_on_one_rank, plain_model

TYPES = (torch.bfloat16, torch.float32)
REASONS = {dtype: cpu_attention.why_not(64, dtype) for dtype in TYPES}
has_kernel = pytest.mark.skipif(REASONS[torch.bfloat16] != "", reason=REASONS[torch.bfloat16])
in_both_types = pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=pytest.mark.skipif(r != "", reason=r)) for d, r in REASONS.items()],
)
FORWARD = "meshwright.cpu_attention.default"


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
    return cpu_attention.attend(q, k, v, scale=0.2)


def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return own(q, k, v).sin()


def gradients(attend, tensors: list[Tensor]) -> list[Tensor]:
    return results(attend, tensors)[1:]


def results(attend, tensors: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    *qkv, grad = tensors
    leaves = [x.detach().to(dtype).requires_grad_() for x in qkv]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm())


SHAPES = {  # B, N, K, S, H
    "whole blocks": (2, 4, 2, 256, 64),
    "odd": (1, 4, 1, 333, 32),
    "shorter than a block": (2, 2, 2, 17, 128),
    "one head of odd width": (1, 1, 1, 129, 48),
    "any size of scores": (2, 4, 2, 300, 32),
}

WORSE = {torch.bfloat16: 1.05, torch.float32: 4.0}
"""Than torch's errors. In fp32 both are some units in the last place, and a CPU's vectors decide:
each of 16 lanes adds up a 16th of the terms, with a quarter of the error of one lane."""


@in_both_types
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_against_fp64_are_no_larger_than_sdpas(shape, dtype) -> None:
    q, k, v, grad = inputs(*SHAPES[shape])
    if shape == "any size of scores":
        # a row's largest changes from block to block, by more than exponentials can hold
        q, k = q * 30, k * torch.linspace(1, 30, 300).bfloat16()[:, None]
    tensors = [q, k, v, grad]
    want = results(sdpa, tensors, torch.float64)
    for mine, theirs, exact in zip(
        results(own, tensors, dtype), results(sdpa, tensors, dtype), want, strict=True
    ):
        assert mine.isfinite().all()
        if shape == "any size of scores":
            assert error(mine, exact) <= 2 * error(theirs, exact)
        else:
            assert error(mine, exact) <= WORSE[dtype] * error(theirs, exact)
            assert error(mine, exact) < torch.finfo(dtype).eps * exact.norm() * 8
        assert mine.shape == exact.shape
        assert mine.dtype == dtype


@in_both_types
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("length", [130, 300])
def test_windows_of_every_edge_are_the_formula(length, has_sinks, dtype) -> None:
    """Around the sizes of strips (32) and blocks (128), and of the sequence; with sinks too."""
    sinks = torch.tensor([-2.0, 0.5, 1.0, 4.0])
    for window in (2, 3, 31, 33, 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 299, 300, 301):
        *qkv, grad = inputs(1, 4, 2, length, 32)
        tensors = [*qkv, sinks, grad]

        def windowed(
            q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int = window
        ) -> Tensor:
            given = sinks.float() if has_sinks else None
            out = cpu_attention.attend(q, k, v, None, given, scale=0.2, window=window)
            return out + 0 * sinks.sum()

        def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int = window) -> Tensor:
            scores = 0.2 * q @ k.repeat_interleave(2, 1).mT
            sees = torch.ones(length, length).tril().triu(1 - window).bool()
            scores = scores.masked_fill(~sees, -torch.inf)
            of_sinks = sinks.view(-1, 1, 1).expand(1, 4, length, 1)
            if has_sinks:
                scores = torch.cat([scores, of_sinks], -1)
            weights = scores.softmax(-1)[..., :length]
            return weights @ v.repeat_interleave(2, 1) + 0 * sinks.sum()

        exact = results(formula, tensors, torch.float64)
        for mine, want in zip(results(windowed, tensors, dtype), exact, strict=True):
            assert error(mine, want) <= torch.finfo(dtype).eps * want.norm() * 8, window


@has_kernel
def test_a_window_of_one_token_is_its_value() -> None:
    """Scores then have no gradient, in whatever type."""
    tensors = inputs(length=100)
    out, of_q, of_k, of_v = results(
        lambda q, k, v: cpu_attention.attend(q, k, v, scale=0.2, window=1), tensors
    )
    assert torch.equal(out, tensors[2].repeat_interleave(2, 1))
    assert max(of_q.abs().max(), of_k.abs().max()) < 0.05
    assert torch.equal(of_v, tensors[3].double().unflatten(1, (2, 2)).sum(2).bfloat16())


@pytest.mark.slow
@pytest.mark.skipif(REASONS[torch.float32] != "", reason=REASONS[torch.float32])
def test_compiled_for_avx2_it_computes_the_same(monkeypatch) -> None:
    """Vectors of half the length, in half as many registers."""
    tensors = inputs()
    want = results(own, tensors, torch.float32)
    capable = {**torch.cpu.get_capabilities(), "avx512_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capable)
    # inductor's -march=native has AVX-512, whatever the length of its vectors
    monkeypatch.setattr(cpu_attention, "FLAGS", (*cpu_attention.FLAGS, "-mno-avx512f"))
    with inductor_config.patch({"cpp.simdlen": 256}):
        library = cpu_attention._kernel.__wrapped__()
    monkeypatch.setattr(cpu_attention, "_kernel", lambda: library)
    assert library.is_usable(True)
    if not torch.cpu.get_capabilities().get("amx_bf16", False):
        assert not library.is_usable(False)
        with pytest.raises(RuntimeError, match="not compiled for this type"):
            own(*tensors[:3])
    for mine, other in zip(results(own, tensors, torch.float32), want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@has_kernel
def test_one_position_has_no_gradient_of_scores() -> None:
    tensors = inputs(length=1)
    of_q, of_k, of_v = gradients(own, tensors)
    assert of_q.abs().max() < 0.05  # bf16 of delta and of dO V^T differ
    assert of_k.abs().max() < 0.05
    grouped = tensors[3].double().unflatten(1, (2, 2)).sum(2)
    assert torch.equal(of_v, grouped.bfloat16())


@in_both_types
def test_equal_bits_for_any_number_of_threads(dtype) -> None:
    tensors, before = inputs(3, 6, 3, 300, 64), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            found.append(results(own, tensors, dtype))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@in_both_types
def test_the_compiler_is_told_the_layouts_of_results(dtype) -> None:
    tensors = [x.to(dtype).contiguous() for x in inputs()]

    def every_result(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[tuple]:
        found = cpu_attention.cpu_attention(q, k, v, None, 0.2, 9)
        with_sinks = cpu_attention.cpu_attention(q, k, v, q.new_ones(4).float(), 0.2, 9)
        assert [x.stride() for x in with_sinks] == [x.stride() for x in found]
        found += cpu_attention.cpu_attention_backward(grad, q, k, v, *found, 0.2, 9)
        return [(x.shape, x.stride(), x.dtype) for x in found]

    with FakeTensorMode() as mode:
        fake = every_result(*map(mode.from_tensor, tensors))
    assert fake == every_result(*tensors)
    _, num, length, width = fake[0][0]
    assert fake[0][1] == (length * num * width, width, num * width, 1)  # as `heads`


@has_kernel
def test_layout_of_inputs_does_not_matter() -> None:
    *qkv, grad = inputs()
    for lay_out in (Tensor.contiguous, lambda x: x.mT.contiguous().mT):
        got = results(own, [lay_out(x) for x in (*qkv, grad)])
        assert all(map(torch.equal, results(own, [*qkv, grad]), got))
    expanded = torch.ones(()).bfloat16().expand_as(grad)
    whole = results(own, [*qkv, torch.ones_like(grad)])
    assert all(map(torch.equal, whole, results(own, [*qkv, expanded])))


@in_both_types
def test_what_overflows_is_infinite(dtype) -> None:
    q, k, v, grad = (x.to(dtype) for x in inputs())
    too_small = torch.full(q.shape[:-1], -200.0)
    found = cpu_attention.cpu_attention_backward(grad, q, k, v, q, too_small, 0.2, 140)
    assert not any(gradient.isfinite().all() for gradient in found)


@in_both_types
@pytest.mark.parametrize("place", range(4))
def test_nan_does_not_vanish(place, dtype) -> None:
    """`bad_steps` finds it in the loss, or in the gradients."""
    tensors = inputs()
    tensors[place][0, 1, 70, 3] = torch.nan
    out, *found = results(own, tensors, dtype)
    assert any(not gradient.isfinite().all() for gradient in found)
    assert out.isfinite().all() == (place == 3)


def layer_with(mode: str) -> Callable[..., Tensor]:
    """A layer by its policy of recomputation."""
    options = {"context_fn": _keeping(tuple(SAVED_OPS))} if mode == "selective" else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mode == "none":
            return layer(q, k, v)
        return checkpoint(layer, q, k, v, use_reentrant=False, preserve_rng_state=False, **options)

    return attend


@has_kernel
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_without_a_break_and_recomputed(mode) -> None:
    attend, calls = layer_with(mode), []

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
    assert again == (mode == "full")
    assert sum("cpu_attention_backward.default" in call for call in backward) == 1


@has_kernel
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_job_like_one_before_finds_its_graph(mode, tmp_path, monkeypatch) -> None:
    """In the cache of torch.compile: there is none of a graph with an `autograd.Function`, nor of
    one with a policy of recomputation that the cache cannot tell from others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        gradients(torch.compile(layer_with(mode), fullgraph=True), inputs())
        kinds = ("miss", "hit", "bypass")
        found.append([counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in kinds])
    assert found == [[1, 0, 0], [0, 1, 0]]


def test_a_graph_of_other_code_or_for_other_instructions_is_not_found(
    tmp_path, monkeypatch
) -> None:
    """The cache's own key would not tell: a gradient is part of a graph, and not of its key."""
    monkeypatch.setattr(compile_cache, "OURS", tmp_path)
    (tmp_path / "parallelisms").mkdir()
    tags = []
    for code, capability in (("one = 1", "AVX2"), ("one = 1", "AVX512"), ("two = 2", "AVX512")):
        (tmp_path / "parallelisms" / "code.py").write_text(code)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        compile_cache._hash_of_code.cache_clear()
        with compile_cache.compiler.patch(cache_key_tag="of the user"):
            for _ in range(2):
                compile_cache.tell_code_apart()
            tags.append(compile_cache.compiler.cache_key_tag)
    compile_cache._hash_of_code.cache_clear()
    assert len({*tags}) == 3
    assert all(tag.startswith("of the user meshwright ") for tag in tags)
    assert all(tag.count("meshwright") == 1 for tag in tags)


@pytest.mark.parametrize("reason", ["", "of a test"])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_every_block_gets_it_or_none_and_the_log_says_so(monkeypatch, name, reason) -> None:
    asked = []
    monkeypatch.setattr(cpu_attention, "why_not", lambda *of: asked.append(of) or reason)
    model = plain_model(TINY)
    lines = lines_on_one_rank(name, enable=True, model=model)
    chosen = "torch's, since of a test" if reason else "cpu_kernels/attention.cpp"
    assert f"attention: {chosen}" in lines
    forwards = [block.attention.core.forward for block in model.layers.values()]
    assert [forward is cpu_attention.attend for forward in forwards] == [not reason] * 3
    assert asked == [(TINY.dim // TINY.n_heads, getattr(torch, name))]
    assert "meshwright" in compile_cache.compiler.cache_key_tag


@pytest.mark.parametrize("case", ["GPU", "eager", "torch", "documents"])
def test_jobs_without_the_kernel_do_not_ask_for_it(monkeypatch, case) -> None:
    monkeypatch.setattr(cpu_attention, "why_not", lambda *_: pytest.fail("asked for it"))
    lines = lines_on_one_rank(
        "bfloat16",
        "cuda" if case == "GPU" else "cpu",
        mask_documents=case == "documents",
        enable=case != "eager",
        cpu_attention="torch" if case == "torch" else "auto",
    )
    assert not any("attention" in line for line in lines)


@pytest.mark.parametrize(
    ("has", "dtype", "width_unit", "reason"),
    [
        ("amx_bf16", torch.bfloat16, 16, "the kernel was not compiled: g++: not found"),
        ("amx_bf16", torch.bfloat16, 64, "the width of heads, 32, does not divide by 64"),
        ("none", torch.bfloat16, 16, "this CPU has no AMX-BF16 or AVX512-BF16"),
        ("none", torch.float32, 16, "this CPU has no AVX2"),
    ],
)
def test_without_the_kernel_a_line_says_why(monkeypatch, has, dtype, width_unit, reason) -> None:
    compiled = Mock(side_effect=RuntimeError("g++: not found\nmore"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    monkeypatch.setattr(cpu_attention, "_kernel", compiled)
    monkeypatch.setattr(cpu_attention, "WIDTH_UNIT", width_unit)
    cpu_attention.why_not.cache_clear()
    assert cpu_attention.why_not(32, dtype) == reason
    assert compiled.called == ("compiled" in reason)
    cpu_attention.why_not.cache_clear()


@pytest.mark.skipif(REASONS[torch.float32] != "", reason=REASONS[torch.float32])
@pytest.mark.parametrize("name", ["attend", "differentiate"])
def test_a_lack_of_memory_is_an_error_of_python(name) -> None:
    long = torch.zeros(16).expand(1, 1, 2**44, 16)
    function = getattr(cpu_attention._kernel(), name)
    with pytest.raises(RuntimeError, match="allocate"):
        cpu_attention._call(function, [long] * 7, [long], torch.zeros(1), 1, 0.2, 1)
