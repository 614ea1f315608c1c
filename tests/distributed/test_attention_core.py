"""What stands in the place of `attention.core` keeps its contract: scale, own width of values."""

import pytest
import torch

from meshwright.models.attention import CausalAttention, dense_mask
from meshwright.models.generation import CachedAttention
from meshwright.parallelisms.context_parallel import attend, local_positions
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.tiny import meshes_of

SCALE = 0.3  # not H^-1/2
BATCH, HEADS, KV_HEADS, SEQ_LEN = 2, 4, 2, 16
WIDTHS = ((8, 8), (8, 4), (4, 8))
"""Of keys, and of values."""


def inputs(key_width: int, value_width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, key_width), (KV_HEADS, key_width), (KV_HEADS, value_width)]
    return [
        torch.randn(BATCH, heads, SEQ_LEN, width, generator=generator, requires_grad=True)
        for heads, width in shapes
    ]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The formula."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = (SCALE * q @ k.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(("key_width", "value_width"), WIDTHS)
def test_one_device_and_generation_keep_the_contract(key_width, value_width) -> None:
    q, k, v = (x.detach() for x in inputs(key_width, value_width))
    want = plain(q, k, v, torch.ones(SEQ_LEN, SEQ_LEN).tril().bool())
    torch.testing.assert_close(CausalAttention()(q, k, v, scale=SCALE), want)
    cached, first = CachedAttention(SEQ_LEN), slice(0, SEQ_LEN - 1)
    before = cached(*(x[:, :, first] for x in (q, k, v)), scale=SCALE)
    last = cached(*(x[:, :, SEQ_LEN - 1 :] for x in (q, k, v)), scale=SCALE)
    torch.testing.assert_close(torch.cat([before, last], dim=2), want)


@pytest.mark.ranks(2)
def test_context_parallelism_keeps_the_contract() -> None:
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=2), "cpu").cp
    positions = local_positions(SEQ_LEN, mesh, torch.device("cpu"))
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    whole_mask = dense_mask(documents)
    for widths in WIDTHS:
        for has_flash, mask in (
            (True, None),
            (False, None),
            (True, dense_mask(documents, positions)),
        ):
            causal = torch.ones(SEQ_LEN, SEQ_LEN).tril().bool()
            whole = inputs(*widths)
            want = plain(*whole, causal if mask is None else whole_mask)
            own = [x.detach()[:, :, positions].requires_grad_() for x in whole]
            got = attend(*own, mask, scale=SCALE, mesh=mesh, has_flash=has_flash)
            torch.testing.assert_close(got, want[:, :, positions])
            want.square().sum().backward()
            got.square().sum().backward()
            for mine, theirs in zip(own, whole, strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad[:, :, positions])
