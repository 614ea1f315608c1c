"""What backward computes again, counted; gradients are the same to the bit."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.parallelisms.activation_checkpoint import apply_ac
from tests.helpers.tiny import SEQ_LEN, TINY, plain_llama

TOKENS = torch.randint(TINY.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def run(mode: str, option: str) -> tuple[int, dict[str, torch.Tensor]]:
    """FLOPs of matrix products in backward, and the gradients."""
    model = plain_llama()
    apply_ac(model.layers, mode, option)
    loss = model(TOKENS).square().sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "option", "blocks_recomputed"),
    [("full", "op", 3), ("selective", "1", 3), ("selective", "2", 2), ("selective", "op", 0)],
)
def test_what_is_recomputed(mode: str, option: str, blocks_recomputed: int) -> None:
    plain_flops, plain_gradients = run("none", "op")
    flops, gradients = run(mode, option)
    block = plain_llama().layers["0"]
    # matrix products of one block's forward; the last is not needed again: early stopping
    matrices = [p for p in block.parameters() if p.dim() == 2]
    needed = sum(p.numel() for p in matrices) - block.feed_forward.w2.weight.numel()
    assert flops - plain_flops == blocks_recomputed * 2 * TOKENS.numel() * needed
    for name, want in plain_gradients.items():
        assert torch.equal(gradients[name], want), name


def saved_bytes(mode: str) -> int:
    model, total = plain_llama(), 0
    apply_ac(model.layers, mode, "op")

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        model(TOKENS)
    return total


def test_less_is_kept() -> None:
    assert saved_bytes("full") < 0.5 * saved_bytes("none")
