"""Products by oneDNN in the place of MKL's: which they are, their results, who asks for them."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from meshwright.config.job_config import (
    ActivationCheckpoint,
    Compile,
    Float8,
    Parallelism,
    Training,
)
from meshwright.models.layers import fp32_products
from meshwright.models.layers.mixed import Linear
from meshwright.parallelisms.parallelize import parallelize
from tests.helpers.tiny import TINY, plain_model

M, K, N = 130, 96, 200  # enough multiplications
Product = Callable[[Tensor, Tensor], Tensor]


def _has_library() -> bool:
    try:
        fp32_products._library()
    except Exception:  # no compiler: on such machines nothing is exchanged
        return False
    return torch.backends.mkldnn.is_available()


needs_library = pytest.mark.skipif(not _has_library(), reason="no compiler, or no oneDNN")


@pytest.fixture
def taken() -> Iterator[None]:
    fp32_products.take(True)
    yield
    fp32_products.take(False)


def into_new(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def garbage(a: Tensor, b: Tensor) -> Tensor:
    """Memory for a product: NaN, where the type has that."""
    value = torch.nan if a.is_floating_point() else 7
    return torch.full((len(a), b.shape[1]), value, dtype=a.dtype)


def into_given(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out=garbage(a, b))


def added_to_nothing(a: Tensor, b: Tensor) -> Tensor:
    return garbage(a, b).addmm_(a, b, beta=0)


def added(a: Tensor, b: Tensor) -> Tensor:
    return torch.ones(len(a), b.shape[1], dtype=a.dtype).addmm_(a, b, beta=2) - 2


WAYS = (into_new, into_given, added_to_nothing, added)


def matrices() -> list[tuple[Tensor, Tensor]]:
    """In each layout that a step has: as they are, transposed, rows of a larger one."""
    torch.manual_seed(0)
    a, b = torch.randn(M, K), torch.randn(K, N)
    transposed = torch.randn(K, M).t(), torch.randn(N, K).t()
    parts = torch.randn(M + 7, 2 * K)[7:, K:], torch.randn(2 * K, N + 9)[K:, 9:]
    return [(x, y) for x in (a, transposed[0], parts[0]) for y in (b, transposed[1], parts[1])]


def onednn_calls(text: str) -> int:
    return sum("exec" in line and "matmul" in line for line in text.splitlines())


@needs_library
@pytest.mark.parametrize("product", WAYS)
def test_onednn_multiplies_and_the_result_is_right(taken, product: Product, capfd) -> None:
    pairs = matrices()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        results = [product(a, b) for a, b in pairs]
    assert onednn_calls(capfd.readouterr().out) == len(pairs)
    for (a, b), got in zip(pairs, results, strict=True):
        want = a.double() @ b.double()
        assert got.dtype == torch.float32
        assert (got - want).norm() < 1e-6 * want.norm()


OTHERS = {
    "bf16": lambda a, b: (a.bfloat16(), b.bfloat16()),
    "fp64": lambda a, b: (a.double(), b.double()),
    "integers": lambda a, b: ((9 * a).long(), (9 * b).long()),
    "small": lambda a, b: (a[:30], b),
    "empty": lambda a, b: (a[:0], b),
    "repeated": lambda a, b: (a[:1].expand(M, K), b),
    "strided": lambda a, b: (a[:, ::2], b[::2]),
}


@needs_library
@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("case", OTHERS)
def test_other_matrices_are_multiplied_as_before(product: Product, case) -> None:
    a, b = OTHERS[case](*matrices()[0])
    want = product(a, b)
    fp32_products.take(True)
    try:
        got = product(a, b)
    finally:
        fp32_products.take(False)
    assert torch.equal(got, want)


@needs_library
def test_results_that_do_not_fit_are_torchs_affair(taken) -> None:
    a, b = matrices()[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(a, b[1:])
    columns = torch.empty(N, M).t()
    near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    near(torch.mm(a, b, out=columns), a @ b)
    near(torch.ones(M, 1).addmm_(a, b[:, :1]), a @ b[:, :1] + 1)
    near(torch.ones(M, N).addmm_(a, b, alpha=3), 3 * (a @ b) + 1)
    with pytest.raises(RuntimeError):
        torch.ones(N).addmm_(a, b)


@needs_library
def test_nan_does_not_vanish(taken) -> None:
    a, b = matrices()[0]
    a[3, 5] = torch.nan
    assert into_new(a, b).isnan().nonzero()[:, 0].unique().tolist() == [3]


@needs_library
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_layer_and_its_gradients(taken, is_compiled, capfd) -> None:
    layer, x = Linear(K, N), torch.randn(2, M, K, requires_grad=True)
    weight = layer.weight.detach().double().requires_grad_()
    exact = x.detach().double().requires_grad_()
    wants = torch.autograd.grad((exact @ weight.t()).square().sum(), [exact, weight])
    if is_compiled:
        layer.compile(fullgraph=True)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        gets = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    assert onednn_calls(capfd.readouterr().out) == 3
    for got, want in zip(gets, wants, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def reason_on(monkeypatch, vendor: str, capabilities: dict[str, bool], tmp_path) -> str:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(fp32_products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    fp32_products.why_not.cache_clear()
    try:
        return fp32_products.why_not()
    finally:
        fp32_products.why_not.cache_clear()


def broken() -> None:
    raise RuntimeError("g++: not found\nmore")


def test_only_where_mkl_leaves_avx_512_alone(monkeypatch, tmp_path) -> None:
    has, lacks = {"avx512_f": True}, {"avx2": True}
    monkeypatch.setattr(fp32_products, "_library", lambda: pytest.fail("compiled"))
    assert reason_on(monkeypatch, "AuthenticAMD", lacks, tmp_path) == "this CPU has no AVX-512"
    reason = reason_on(monkeypatch, "GenuineIntel", has, tmp_path)
    assert reason == "MKL has kernels for this CPU's AVX-512"
    monkeypatch.setattr(fp32_products, "_library", lambda: None)
    assert reason_on(monkeypatch, "AuthenticAMD", has, tmp_path) == ""
    monkeypatch.setattr(fp32_products, "_library", broken)
    reason = reason_on(monkeypatch, "AuthenticAMD", has, tmp_path)
    assert reason == "they were not compiled: g++: not found"


@pytest.mark.parametrize(
    ("reason", "line"),
    [("", "oneDNN's"), ("of a test", "torch's, since of a test")],
)
def test_compiled_jobs_in_fp32_ask_for_them_and_others_give_them_back(
    monkeypatch, reason, line
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(fp32_products, "why_not", lambda: reason)
    monkeypatch.setattr(fp32_products, "take", calls.append)
    alone = SimpleNamespace(size=lambda: 1, device_type="cpu")

    def lines(dtype: str = "float32", **compilation: object) -> list[str]:
        return parallelize(
            plain_model(TINY),
            SimpleNamespace(world=alone, tp=alone, cp=alone),
            training=Training(mixed_precision_param=dtype),
            parallelism=Parallelism(),
            recomputation=ActivationCheckpoint(),
            compilation=Compile(backend="eager", cpu_attention="torch", **compilation),
            float8_options=Float8(),
        )

    wanted = f"products in float32: {line}"
    assert wanted in lines(enable=True)
    assert calls == ([] if reason else [True])
    calls.clear()
    for others in (
        lines(),
        lines(enable=True, cpu_products="torch"),
        lines("bfloat16", enable=True),
    ):
        assert not any("products" in text for text in others)
    assert calls == [False] * 3
