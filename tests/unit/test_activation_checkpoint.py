"""What backward computes again, counted; gradients are the same to the bit."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._higher_order_ops import wrap
from torch.utils.flop_counter import FlopCounterMode

from meshwright.config.parallelism import SAVED_OPS, ActivationCheckpoint
from meshwright.models import attention
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.activation_checkpoint import (
    MESHES_HAVE_NO_SIZE,
    apply_ac,
    find_ops,
    keep_within_budget,
)
from meshwright.system.errors import ConfigError
from tests.helpers.job import assert_equal
from tests.helpers.needs import needs_compiler
from tests.helpers.operators import Operators
from tests.helpers.tiny import SEQ_LEN, TINY, plain_model

TOKENS = torch.randint(TINY.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


def llama(mode: str, **options: object) -> Decoder:
    model = plain_model()
    apply_ac(model.layers, ActivationCheckpoint(mode=mode, **options))
    return model


def backward(model: Decoder) -> tuple[Counter[str], int, dict[str, torch.Tensor]]:
    """Operators called, FLOPs of matrix products, and the gradients."""
    loss = model(TOKENS).square().sum()
    with Operators() as operators, FlopCounterMode(display=False) as flops:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # from torch 2.15 on the total counts the attention of CPUs, too
    return operators.counts, flops.get_flop_counts()["Global"][torch.ops.aten.mm], gradients


@pytest.mark.parametrize(
    ("mode", "option", "blocks_recomputed"),
    [("full", "op", 3), ("selective", "1", 3), ("selective", "2", 2), ("selective", "op", 0)],
)
def test_as_many_blocks_are_recomputed_as_asked(
    mode: str, option: str, blocks_recomputed: int
) -> None:
    _, plain_flops, plain_gradients = backward(llama("none"))
    _, flops, gradients = backward(llama(mode, selective_ac_option=option))
    block = plain_model().layers["0"]
    # matrix products of one block's forward; the last is not needed again: early stopping
    matrices = [p for p in block.parameters() if p.dim() == 2]
    needed = sum(p.numel() for p in matrices) - block.feed_forward.w2.weight.numel()
    assert flops - plain_flops == blocks_recomputed * 2 * TOKENS.numel() * needed
    assert_equal(gradients, plain_gradients)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "selective"}])
def test_a_block_with_dropout_is_recomputed_with_its_masks(options, p, monkeypatch) -> None:
    gradients = []
    for mode in ({"mode": "none"}, options):
        model = plain_model()
        for block in model.layers.values():
            block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(p))
        apply_ac(model.layers, ActivationCheckpoint(**mode))
        torch.manual_seed(0)
        gradients.append(backward(model)[2])
    assert_equal(*gradients)
    states = []
    monkeypatch.setattr(torch, "get_rng_state", lambda: states.append(1) or torch.zeros(0))
    model(TOKENS)
    assert bool(states) == (p > 0)  # a block without it saves no state


def test_every_nth_block_is_counted_from_the_models_first() -> None:
    """A stage that begins with another must not shift it."""
    stage = plain_model()
    del stage.layers["0"]
    forwards = {number: block.forward for number, block in stage.layers.items()}
    apply_ac(stage.layers, ActivationCheckpoint(mode="selective", selective_ac_option="2"))
    wrapped = [
        number for number, block in stage.layers.items() if block.forward != forwards[number]
    ]
    assert wrapped == ["2"]


@pytest.mark.parametrize("saved", ["aten.mm", ATTENTION, "aten.rsqrt", "aten.silu"])
def test_what_is_saved_is_not_recomputed(saved: str) -> None:
    plain, _, plain_gradients = backward(llama("none"))
    full, _, _ = backward(llama("full"))
    only, _, gradients = backward(llama("selective", saved_ops=[saved]))
    assert full[saved] > plain[saved]
    assert only == full - Counter({saved: full[saved] - plain[saved]})
    assert_equal(gradients, plain_gradients)


def test_torch_may_lack_an_op_of_the_default_but_none_of_the_users(monkeypatch) -> None:
    """2.11 has not all of the former."""
    for name in ("aten.mmm", "atn.mm", "aten.__name__", "aten.__dir__"):
        with pytest.raises(ConfigError, match=f"saved_ops = {name!r}: torch .* has no such op"):
            find_ops(["aten.mm", name])
    everything = find_ops(SAVED_OPS)
    assert torch.ops.higher_order.flex_attention in everything
    monkeypatch.setattr(torch.ops, "higher_order", object())
    assert {*find_ops(SAVED_OPS)} < {*everything}


class WithCompiledPart(nn.Module):
    """As a block whose flex attention alone is compiled; on CPUs that has no backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention._compiled(torch.special.i0e)(x.sin()).sin()


@pytest.mark.slow
@needs_compiler
def test_a_compiled_part_of_an_eager_block_is_kept(monkeypatch) -> None:
    calls = []
    operator, key = wrap.inductor_compiled_code, torch._C.DispatchKey.CompositeExplicitAutograd
    run = operator.py_kernels[key]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(operator, "py_kernels", operator.py_kernels | {key: counting})
    monkeypatch.setattr(operator, "_dispatch_cache", {})
    torch._dynamo.reset()
    attention._compiled.cache_clear()
    counts, gradients = [], []
    for saved_ops in (["aten.mm"], SAVED_OPS):
        blocks = nn.ModuleDict({"0": WithCompiledPart()})
        apply_ac(blocks, ActivationCheckpoint(mode="selective", saved_ops=saved_ops))
        for _ in range(2):  # the first compiles
            x = torch.linspace(-1, 1, 8, requires_grad=True)
            calls.clear()
            blocks["0"](x).sum().backward()
        counts.append(len(calls))
        gradients.append(x.grad)
    assert counts[1] == counts[0] - 1
    assert torch.equal(*gradients)


def saved_bytes(model: Decoder) -> int:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(TOKENS)
    return sum(tensor.nbytes for tensor in kept)


def test_a_lower_budget_keeps_less_and_recomputes_more() -> None:
    assert saved_bytes(llama("full")) < 0.5 * saved_bytes(llama("none"))
    kept, flops = [], []
    _, _, plain_gradients = backward(llama("none"))
    for budget in (1.0, 0.25, 0.0):
        model = llama("memory_budget")
        for block in model.layers.values():
            block.compile(fullgraph=True, backend=keep_within_budget("aot_eager", budget))
        model(TOKENS)  # compile
        kept.append(saved_bytes(model))
        _, count, gradients = backward(model)
        flops.append(count)
        assert_equal(gradients, plain_gradients)
    assert kept == sorted(set(kept), reverse=True)
    assert flops == sorted(set(flops))


def test_a_budget_under_tensor_parallelism_needs_a_torch_that_can(monkeypatch) -> None:
    monkeypatch.delattr(f"torch._functorch.config.{MESHES_HAVE_NO_SIZE}", raising=False)
    with pytest.raises(ConfigError, match="cannot with tensor parallelism"):
        keep_within_budget("aot_eager", 0.1, has_meshes=True)
