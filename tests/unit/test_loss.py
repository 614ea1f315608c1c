"""The loss in chunks against the plain formula, which makes whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.config.loader import load_config
from meshwright.models import loss
from meshwright.models.loss import IGNORE, PADDING, SummedLoss
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.tensor_parallel import VocabularyParallelLoss
from meshwright.train.build import build_model
from tests.helpers.needs import needs_compiler
from tests.helpers.operators import Operators
from tests.helpers.resolved import resolved
from tests.helpers.tiny import TIED, TINY, fake_ranks, plain_model

BATCH, SEQ_LEN, DIM, VOCAB = 2, 13, 8, 37
CHUNKS = (0, 1, 7, 26, 1000)  # 0: all, since logits are few


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight and labels."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ_LEN, DIM).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (BATCH, SEQ_LEN))
    labels[0, :9] = labels[1, ::4] = IGNORE  # a whole chunk of 7, too
    return x, weight, labels


def plain_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def gradients(total: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Of a share of the mean, as a step takes it."""
    return torch.autograd.grad(total / 11, of)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_loss_and_gradients_equal_the_plain_formula(chunk_tokens) -> None:
    x, weight, labels = inputs()
    got, want = SummedLoss(chunk_tokens)(x, weight, labels), plain_loss(x, weight, labels)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    wanted = gradients(want, x, weight)
    torch.testing.assert_close(gradients(got, x, weight), wanted, rtol=1e-5, atol=1e-7)


def test_a_loss_of_the_users_that_has_no_number_without_a_label_has_gradients() -> None:
    x, weight, labels = inputs()
    with torch.no_grad():
        x[labels == IGNORE] = 0.0  # their norm has no gradient
    got = SummedLoss(7)
    got.own = lambda states, logits, targets: (
        logits[:, 0] / (states.norm(dim=1) * logits.norm(dim=1))
    )
    found = gradients(got(x, weight, labels), x, weight)
    assert all(gradient.isfinite().all() for gradient in found)
    assert not found[0][labels == IGNORE].any()
    assert found[0][labels != IGNORE].all()


@pytest.mark.filterwarnings("error")
def test_a_sum_in_a_loss_of_the_users_has_gradients() -> None:
    """torch gives the gradient of a sum as one number for a row, which it warns to write to."""
    x, weight, labels = inputs()
    got = SummedLoss(7)
    got.own = lambda states, logits, targets: states.sum(1) + logits.sum(1)
    of_x, of_weight = gradients(got(x, weight, labels), x, weight)
    counted = labels.flatten() != IGNORE
    wanted = (1 + weight.sum(0)) * counted.unsqueeze(1) / 11  # as `gradients` divides
    torch.testing.assert_close(of_x.flatten(0, 1), wanted.detach(), rtol=1e-5, atol=1e-6)
    assert of_weight.isfinite().all()


@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_of_sequences_have_weights(cap) -> None:
    x, weight, labels = inputs()
    factors = torch.linspace(0.25, 3.0, BATCH)
    got = SummedLoss(7, cap)(x, weight, labels, factors)
    each = [SummedLoss(7, cap)(x[n : n + 1], weight, labels[n : n + 1]) for n in range(BATCH)]
    want = (torch.stack(each) * factors).sum()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    wanted = gradients(want, x, weight)
    torch.testing.assert_close(gradients(got, x, weight), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block", [20, 1 << 20])  # a block of W's gradient: 2 of its rows, or all
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_in_bf16_it_is_as_near_to_fp32_as_the_plain_formula(
    chunk_tokens, block, monkeypatch
) -> None:
    monkeypatch.setitem(loss.BLOCKS, "cpu", block)
    x, weight, labels = inputs(torch.bfloat16)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    exact = gradients(plain_loss(*exact_inputs, labels), *exact_inputs)
    total = SummedLoss(chunk_tokens)(x, weight, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, plain_loss(x, weight, labels), rtol=1e-6, atol=0)
    plain = gradients(plain_loss(x, weight, labels), x, weight)
    for our, their, want in zip(gradients(total, x, weight), plain, exact, strict=True):
        allowed = 1.5 * (their - want).norm() + 2**-9 * want.norm()
        assert (our - want).norm() < allowed  # one rounding more: of what backward scales


@pytest.mark.parametrize("block", [20, 1 << 20])
def test_a_weight_of_another_type_is_as_if_it_were_cast_outside(block, monkeypatch) -> None:
    monkeypatch.setitem(loss.BLOCKS, "cpu", block)
    x, weight, labels = inputs()
    x = x.detach().bfloat16().requires_grad_()
    got = SummedLoss(7)(x, weight, labels)
    want = SummedLoss(7)(x, weight.to(x.dtype), labels)
    assert torch.equal(got, want)
    wanted = gradients(want, x, weight)
    torch.testing.assert_close(gradients(got, x, weight), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.bfloat16, [512, 4096, 2048, 4096]), (torch.float32, [256, 2048, 2048, 2048])],
)
def test_chunks_are_as_long_as_the_model_is_wide_or_half_or_have_16_mi_logits(dtype, sizes) -> None:
    shapes = [(128_256, 512), (128_256, 4096), (8192, 512), (8192, 4096)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    assert [SummedLoss().tokens_per_chunk(weight, dtype) for weight in weights] == sizes
    assert SummedLoss(7).tokens_per_chunk(weights[0], dtype) == 7


@pytest.mark.parametrize(("dtype", "want"), [(torch.bfloat16, DIM), (torch.float32, DIM // 2)])
def test_chunks_of_a_part_of_the_vocabulary_are_those_of_the_whole(
    dtype, want, monkeypatch
) -> None:
    """Else ranks with unequal parts would wait for each other's last chunk. The type is that of
    states: weights are in it on some meshes only."""
    monkeypatch.setattr(loss, "SMALL_LOGITS", 1)
    x, weight, labels = inputs()
    x, found = x.to(dtype), []

    def of_rows(*_: object, chunk_tokens: int, **__: object) -> tuple[Tensor, Tensor]:
        found.append(chunk_tokens)
        return torch.zeros(()), torch.zeros(())

    monkeypatch.setattr(SummedLoss, "of_rows", of_rows)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        layout = {"shape": weight.shape, "stride": weight.stride()}
        part = DTensor.from_local(weight[: -(-VOCAB // 2)], mesh, [Shard(0)], **layout)
        VocabularyParallelLoss(mesh)(x, part, labels)
    SummedLoss()(x, weight, labels)
    assert found == [want, want]


@pytest.mark.parametrize("has_x", [True, False])
@pytest.mark.parametrize("has_weight", [True, False])
def test_only_what_is_trained_gets_a_gradient(has_x, has_weight) -> None:
    x, weight, labels = inputs()
    x.requires_grad_(has_x), weight.requires_grad_(has_weight)
    total = SummedLoss(7)(x, weight, labels)
    assert total.requires_grad == (has_x or has_weight)
    needed = [tensor for tensor in (x, weight) if tensor.requires_grad]
    if needed:
        wanted = gradients(plain_loss(x, weight, labels), *needed)
        torch.testing.assert_close(gradients(total, *needed), wanted, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(SummedLoss(7)(x, weight, labels), total)


def test_each_gradient_can_be_had_once() -> None:
    """One after the other, as pipelines do that split backward; twice is an error, not a scale too
    many."""
    x, weight, labels = inputs()
    total, other = SummedLoss(7)(x, weight, labels), SummedLoss(7)(x, weight, labels)
    both = gradients(other, x, weight)
    for tensor, wanted in zip((x, weight), both, strict=True):
        (grad,) = torch.autograd.grad(total / 11, tensor, retain_graph=True)
        assert torch.equal(grad, wanted)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, tensor, retain_graph=True)


def test_labels_that_count_for_nothing_and_labels_that_are_none() -> None:
    x, weight, labels = inputs()
    for label in (IGNORE, PADDING):
        total = SummedLoss(7)(x, weight, torch.full_like(labels, label))
        assert total == 0
        assert not any(grad.any() for grad in gradients(total, x, weight))
    for wrong in (VOCAB, -1):  # not in silence: the step is bad
        labels[1, 1] = wrong
        assert SummedLoss(7)(x, weight, labels) == torch.inf
    with pytest.raises(ValueError, match=r"states \(2, 13, 8\) and labels \(2, 12\) disagree"):
        SummedLoss()(x, weight, labels[:, 1:])


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-5, 1e-7), (torch.bfloat16, 2**-6, 2**-9)]
)
def test_compiled_it_gives_the_same(dtype, rtol, atol) -> None:
    x, weight, labels = inputs(dtype)
    compiled = SummedLoss(7)
    compiled.compile("inductor")
    total, eager = compiled(x, weight, labels), SummedLoss(7)(x, weight, labels)
    torch.testing.assert_close(total, eager, rtol=1e-6, atol=0)
    wanted = gradients(eager, x, weight)
    torch.testing.assert_close(gradients(total, x, weight), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_where_the_first_product_goes_does_not_count(dtype) -> None:
    total = torch.full((VOCAB, DIM), torch.nan)
    gradient, x = torch.randn(5, VOCAB).to(dtype), torch.randn(5, DIM).to(dtype)
    SummedLoss().add_product(total, gradient, x, is_first=True)
    torch.testing.assert_close(total.to(dtype), gradient.t() @ x)


def test_what_torch_compiles_no_more_is_computed_all_the_same() -> None:
    """A process may meet more shapes and types than it compiles for one function."""
    torch._dynamo.reset()
    compiled = SummedLoss(7)
    compiled.compile("eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x, weight, labels = inputs()
            x, weight = x.detach().to(dtype), weight.detach().to(dtype)
            eager = SummedLoss(7)(x, weight, labels)
            torch.testing.assert_close(compiled(x, weight, labels), eager, rtol=1e-5, atol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
def test_a_model_never_has_whole_logits(args) -> None:
    """Not with labels: all that is made is smaller, forward and backward."""
    model, tokens = plain_model(args), torch.zeros(8, 16, dtype=torch.int64)
    model.output.loss.chunk_tokens = args.dim
    whole = tokens.numel() * args.vocab_size
    sizes: list[int] = []

    def note(name: str, types: object, args: object, made: list[Tensor]) -> None:
        sizes.extend(tensor.untyped_storage().nbytes() // 4 for tensor in made)

    with Operators(note):
        model(tokens, tokens).backward()
    assert args.dim * args.vocab_size <= max(sizes) < whole
    with Operators(note):
        model(tokens).sum().backward()
    assert max(sizes) >= whole


def test_the_config_sets_the_size_of_chunks_and_whether_they_are_compiled(monkeypatch) -> None:
    compiled = []
    monkeypatch.setattr(SummedLoss, "compile", lambda _, backend: compiled.append(backend))
    words = ["--training.loss_chunk_tokens=5", "--compile.enable=true", "--compile.backend=eager"]
    with fake_ranks(1):
        plan = resolved(load_config([*words, "--model.tokenizer_path=bytes"]), 1)
        model = build_model(plan, build_meshes(plan.dims, "cpu"), torch.device("cpu"))
    assert model.stages[0].output.loss.chunk_tokens == 5
    assert compiled == ["eager"]
