"""Linear attention by the kernel of fla as a GPU would take it; another stands for the kernel."""

import copy
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.config.loader import load_config
from meshwright.models.decoder import Decoder
from meshwright.models.delta import DeltaSpec
from meshwright.models.delta_net import DeltaCore
from meshwright.models.delta_rule import CHUNK
from meshwright.parallelisms import activation_checkpoint
from meshwright.parallelisms.delta_kernel import (
    apply_delta_kernel,
    delta_rule,
    recur,
    why_chunks,
)
from meshwright.parallelisms.initialize import initialize
from tests.helpers import fake_fla
from tests.helpers.delta_layer import (
    BATCH,
    HEADS,
    KEY_HEADS,
    SEQ,
    K,
    V,
    inputs,
    results,
    several_documents,
)
from tests.helpers.resolved import resolved

BF16 = "--training.mixed_precision_param=bfloat16"


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("has_documents", [False, True])
def test_the_kernel_gives_what_chunks_give(monkeypatch, has_documents, dtype, bound) -> None:
    fake_fla.install(monkeypatch)
    documents = several_documents() if has_documents else None
    given = inputs(dtype)
    got, want = results(recur, given, documents), results(DeltaCore(), given, documents)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= bound * other.abs().max()
    rows, tokens = (1, BATCH * SEQ) if has_documents else (BATCH, SEQ)
    for call in fake_fla.calls:  # forward, and once more in backward
        assert call["q"] == (rows, tokens, KEY_HEADS, K)
        assert call["v"] == (rows, tokens, HEADS, V)
        assert call["dtype"] == dtype
        starts = call["starts"]
        assert has_documents == (starts is not None)
        if has_documents:
            assert starts.tolist() == [0, 5, 6, 30, 40, 41, 42, 60, 80]
    assert len(fake_fla.calls) == 2


def test_the_operator_keeps_the_rules_of_operators(monkeypatch) -> None:
    fake_fla.install(monkeypatch)
    q, k = torch.randn(2, BATCH, 6, KEY_HEADS, K).unbind(0)
    v = torch.randn(BATCH, 6, HEADS, V)
    decay, strength = -torch.rand(BATCH, 6, HEADS), torch.rand(BATCH, 6, HEADS)
    given = [x.requires_grad_() for x in (q, k, v, decay, strength)]
    torch.library.opcheck(delta_rule, (*given, several_documents()[:, :6]))


def on_a_gpu(*words: str) -> tuple[Decoder, str]:
    """A small model, as a GPU would have it but for its place, and the line of the log."""
    config = load_config(["--model.tokenizer_path=bytes", "--training.seq_len=40", *words])
    degree = 2 if config.sentry.interval else config.parallelism.context_parallel_degree
    with torch.device("meta"):
        model = Decoder(resolved(config, degree).model_args, config.training.seq_len)
    model.to_empty(device="cpu")
    initialize(model, 1)
    return model, apply_delta_kernel(model, "cuda", config)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_model_computes_by_the_kernel(monkeypatch, name: str, is_compiled: bool) -> None:
    """Compiled and recomputed, each block is still one graph."""
    fake_fla.install(monkeypatch)
    words = (f"--model.name={name}", BF16, "--activation_checkpoint.mode=full")
    model, line = on_a_gpu(*words)
    assert line == "linear attention: fla 0.6.0"
    plain = copy.deepcopy(model)
    for block in plain.layers.values():
        vars(block.get_submodule("attention.core")).pop("forward", None)
    if is_compiled:
        torch._dynamo.reset()
        options = load_config(list(words)).activation_checkpoint
        activation_checkpoint.apply_ac(model.layers, options)
        for block in model.layers.values():
            block.compile(fullgraph=True, backend="aot_eager")
    tokens = torch.randint(plain.tok_embeddings.weight.shape[0], (2, 40))
    outputs = [one(tokens) for one in (model, plain)]
    assert fake_fla.calls
    assert torch.allclose(*outputs, rtol=0, atol=1e-4 * float(outputs[1].detach().abs().max()))
    for out in outputs:
        out.float().square().mean().backward()
    for (path, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (one.grad - other.grad).abs().max()
        assert error <= 1e-3 * other.grad.abs().max() + 1e-9, path


NEXT = "--model.name=qwen3_next"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], ""),
        (["--training.deterministic=true"], "training.deterministic is on"),
        (["--sentry.interval=5"], "sentry.interval compares bits"),
        (["--parallelism.context_parallel_degree=2"], "no map of a rank's two chunks"),
        (["--training.mixed_precision_param=float32"], "would round float32"),
        (["--model.args.linear_key_head_dim=256"], ""),
        (["--model.args.linear_key_head_dim=272"], "at most 256 numbers, not 272"),
    ],
)
def test_a_job_that_the_kernel_does_not_serve_goes_on_without(monkeypatch, words, reason) -> None:
    fake_fla.install(monkeypatch)
    bf16 = [BF16] * all("float32" not in word for word in words)
    model, line = on_a_gpu(NEXT, *bf16, *words)
    taken = [vars(one).get("forward") for one in model.modules() if isinstance(one, DeltaCore)]
    assert taken
    assert set(taken) == {None if reason else recur}
    assert reason in line
    assert line.startswith("linear attention: in chunks by PyTorch, since" if reason else "linear")


def test_the_widest_layer_decides_for_all_stages() -> None:
    spec = DeltaSpec(64, 4, 2, 512, 16, 4, 1e-6, 0.02, 0.02)
    layers = [SimpleNamespace(attention=replace(spec, key_dim=width)) for width in (16, 512, 16)]
    config = load_config([NEXT, BF16])
    assert why_chunks(SimpleNamespace(layers=layers), "cuda", config).endswith("not 512")


def test_a_package_that_is_missing_old_or_broken_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    model, line = on_a_gpu(NEXT, BF16)
    assert "forward" not in vars(model.layers["0"].get_submodule("attention.core"))
    assert "since fla" in line
    assert "pip install fla-core" in line
    fake_fla.install(monkeypatch, "0.4.2")
    assert "fla 0.4.2 is older than 0.5" in on_a_gpu(NEXT, BF16)[1]
    fake_fla.install(monkeypatch, "0.5.0")
    assert on_a_gpu(NEXT, BF16)[1] == "linear attention: fla 0.5.0"
    fake_fla.install(monkeypatch, "0.6rc1")
    assert on_a_gpu(NEXT, BF16)[1] == "linear attention: fla 0.6rc1"
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", ModuleType("empty"))
    assert "fla cannot be imported: module 'empty' has no" in on_a_gpu(NEXT, BF16)[1]


def test_the_plan_counts_the_products_of_a_chunk(monkeypatch) -> None:
    fake_fla.install(monkeypatch)
    k, v, scores = torch.randn(CHUNK, 48), torch.randn(CHUNK, 80), torch.randn(CHUNK, CHUNK)
    state = torch.randn(48, 80)
    with FlopCounterMode(display=False) as products:
        for left, right in ((k, k.mT), (k, k.mT), (scores, k), (scores, v), (scores, v)):
            left @ right  # keys, queries; what is read, written, and seen of the chunk
        for left, right in ((k, state), (k, state), (k.mT, v)):
            left @ right  # keys and queries with the state, and the next state
    heads = [x.view(1, CHUNK, 1, -1).requires_grad_() for x in (k, k.clone(), v)]
    of_tokens = [torch.zeros(1, CHUNK, 1, requires_grad=True) for _ in range(2)]
    with FlopCounterMode(display=False) as counted:
        out = delta_rule(*heads, *of_tokens, None)
    assert counted.get_total_flops() == products.get_total_flops()
    with FlopCounterMode(display=False) as counted:  # forward again, and twice as much
        out.sum().backward()
    assert counted.get_total_flops() == 3 * products.get_total_flops()


def test_other_models_and_cpus_say_nothing(monkeypatch) -> None:
    fake_fla.install(monkeypatch)
    assert on_a_gpu("--model.name=llama", BF16)[1] == ""
    model, _ = on_a_gpu(NEXT, BF16)
    assert apply_delta_kernel(model, "cpu", load_config([NEXT, BF16])) == ""
