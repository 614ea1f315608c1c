"""Products by oneDNN in the place of MKL's: which they are, their results, who asks for them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from meshwright.models.kernels import onednn_products
from meshwright.models.layers import Linear
from tests.helpers.tiny import lines_on_one_rank

M, K, N = 130, 96, 200  # enough multiplications
Product = Callable[[Tensor, Tensor], Tensor]


def _has_library() -> bool:
    try:
        onednn_products._library()
    except Exception:  # no compiler: on such machines nothing is exchanged
        return False
    return onednn_products.can_compute()


needs_library = pytest.mark.skipif(not _has_library(), reason="no compiler, or no AVX-512")


@pytest.fixture
def taken() -> Iterator[None]:
    onednn_products.take(True)
    yield
    onednn_products.take(False)


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
    lefts = torch.randn(M, K), torch.randn(K, M).t(), torch.randn(M + 7, K)[7:]
    rights = torch.randn(K, N), torch.randn(N, K).t(), torch.randn(N + 7, K)[7:].t()
    return [(a, b) for a in lefts for b in rights]


@contextmanager
def counted(capfd: pytest.CaptureFixture[str], want: int) -> Iterator[None]:
    """So many matrices are multiplied by oneDNN in here, by its own account."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        yield
    lines = capfd.readouterr().out.splitlines()
    assert sum("exec" in line and "matmul" in line for line in lines) == want


@needs_library
@pytest.mark.parametrize("product", WAYS)
def test_onednn_multiplies_and_the_result_is_right(taken, product: Product, capfd) -> None:
    pairs = matrices()
    with counted(capfd, len(pairs)):
        results = [product(a, b) for a, b in pairs]
    for (a, b), got in zip(pairs, results, strict=True):
        want = a.double() @ b.double()
        assert got.dtype == torch.float32
        assert (got - want).norm() < 1e-6 * want.norm()


OTHERS = {
    "fp64": lambda a, b: (a.double(), b.double()),
    "integers": lambda a, b: ((9 * a).long(), (9 * b).long()),
    "small": lambda a, b: (a[:30], b),
    "empty": lambda a, b: (a[:0], b),
    "repeated": lambda a, b: (a[:1].expand(M, K), b),
    "strided": lambda a, b: (a[:, ::2], b[::2]),
    "parts of rows": lambda a, b: (a, b[:, 9:]),
}


@needs_library
@pytest.mark.parametrize("product", WAYS)
@pytest.mark.parametrize("case", OTHERS)
def test_other_matrices_are_multiplied_as_before(product: Product, case, capfd) -> None:
    a, b = OTHERS[case](*matrices()[0])
    want = product(a, b)
    onednn_products.take(True)
    try:
        with counted(capfd, 0):
            got = product(a, b)
    finally:
        onednn_products.take(False)
    assert torch.equal(got, want)


@needs_library
def test_products_that_were_given_back_are_mkls_and_those_that_a_user_keeps(capfd) -> None:
    a, b = matrices()[0]
    onednn_products.take(True)
    assert onednn_products.are_taken()
    with counted(capfd, 0), torch.backends.mkldnn.flags(enabled=False):
        torch.mm(a, b)
    onednn_products.take(False)
    assert not onednn_products.are_taken()
    with counted(capfd, 0):
        torch.mm(a, b)


@needs_library
def test_products_into_other_layouts_and_by_factors_are_torchs(taken, capfd) -> None:
    a, b = matrices()[0]
    columns, wrong = torch.empty(N, M).t(), torch.ones(N)
    with counted(capfd, 0):
        torch.mm(a, b, out=columns)
        torch.ones(M, 1).addmm_(a, b[:, :1])
        torch.ones(M, N).addmm_(a, b, alpha=3)
        with pytest.raises(RuntimeError):
            wrong.addmm_(a, b)
        for shape in ((0, N), (M, 0)):  # torch gives them the right size
            assert torch.mm(a, b, out=torch.empty(shape)).shape == (M, N)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(a, b[1:])


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
    with counted(capfd, 3):
        gets = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    for got, want in zip(gets, wants, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def reason_on(monkeypatch, vendor: str, tmp_path, *, has_avx_512: bool = True) -> str:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    path = tmp_path / ("cpuinfo" if vendor else "none")
    monkeypatch.setattr(onednn_products, "CPU_INFO", path)
    monkeypatch.setattr(onednn_products, "can_compute", lambda: has_avx_512)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: vendor != "without MKL")
    onednn_products.why_not.cache_clear()
    try:
        return onednn_products.why_not()
    finally:
        onednn_products.why_not.cache_clear()


@pytest.mark.parametrize(("is_built", "runs_here"), [(False, True), (True, False)])
def test_torch_needs_onednn_and_the_cpu_its_instructions(monkeypatch, is_built, runs_here) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_built)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: runs_here)
    assert not onednn_products.can_compute()


def broken() -> None:
    raise RuntimeError("g++: not found\nmore")


def test_only_where_mkl_leaves_avx_512_alone(monkeypatch, tmp_path) -> None:
    def reason(vendor: str, *, has_avx_512: bool = True) -> str:
        return reason_on(monkeypatch, vendor, tmp_path, has_avx_512=has_avx_512)

    monkeypatch.setattr(onednn_products, "_library", lambda: pytest.fail("compiled"))
    no_kernels = "torch's oneDNN has no kernels for AVX-512 here"
    assert reason("AuthenticAMD", has_avx_512=False) == no_kernels
    assert reason("without MKL") == "torch has no MKL"
    assert reason("") == "the system does not say whose CPU this is"
    assert reason("GenuineIntel") == "MKL has kernels for this CPU's AVX-512"
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        with monkeypatch.context() as context:
            context.setenv(name, "BF16")
            assert reason("AuthenticAMD") == f"{name} is set, by which oneDNN may round"
    monkeypatch.setattr(onednn_products, "_library", lambda: None)
    assert reason("AuthenticAMD") == ""
    monkeypatch.setattr(onednn_products, "_library", broken)
    assert reason("AuthenticAMD") == "the exchange was not compiled: g++: not found"


@pytest.mark.parametrize(
    ("reason", "line"),
    [("", "oneDNN's"), ("of a test", "torch's, since of a test")],
)
def test_compiled_jobs_in_fp32_ask_for_them_and_others_give_them_back(
    monkeypatch, reason, line
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(onednn_products, "why_not", lambda: reason)
    monkeypatch.setattr(onednn_products, "take", calls.append)

    lines = functools.partial(lines_on_one_rank, cpu_attention="torch")
    wanted = f"products in float32: {line}"
    assert wanted in lines("float32", enable=True)
    assert calls == ([] if reason else [True])
    calls.clear()
    for others in (
        lines("float32"),
        lines("float32", enable=True, cpu_products="torch"),
        lines("bfloat16", enable=True),
        lines("float32", "cuda", enable=True),
    ):
        assert not any("products" in text for text in others)
    assert calls == [False] * 4
