"""The largest attention logit of each head, by tiles, is that of the matrix of all logits."""

import pytest
import torch

from meshwright.models import attention_logits
from meshwright.models.attention import block_mask, dense_mask
from meshwright.models.attention_logits import max_logits

SEQ_LEN = 40
PART = torch.cat([torch.arange(10, 20), torch.arange(30, 40)])


@pytest.mark.parametrize("positions", [None, PART], ids=["all", "part"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("make_mask", [None, dense_mask, block_mask])
def test_tiles_have_the_largest_logit_of_the_full_matrix(
    monkeypatch, make_mask, window, positions
) -> None:
    monkeypatch.setattr(attention_logits, "TILE", 16)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, SEQ_LEN, 8, generator=generator)
    k = torch.randn(2, 3, SEQ_LEN, 8, generator=generator)
    rows = torch.arange(SEQ_LEN) if positions is None else positions
    documents = torch.zeros(2, SEQ_LEN, dtype=torch.int32)
    if make_mask is not None:
        starts = torch.rand(2, SEQ_LEN, generator=generator) < 0.2
        documents = starts.cumsum(1, dtype=torch.int32)
    logits = q[:, :, rows] @ k.repeat_interleave(2, 1).mT * 0.3
    logits = 5 * torch.tanh(logits / 5)
    want = logits.masked_fill(~dense_mask(documents, rows, window), -torch.inf).amax((0, 2, 3))

    mask = None if make_mask is None else make_mask(documents, positions, window)
    got = max_logits(
        q[:, :, rows], k, mask, scale=0.3, window=window, soft_cap=5.0, positions=positions
    )
    torch.testing.assert_close(got, want)
    assert (logits.amax((0, 2, 3)) > got).any()  # some larger ones aren't seen
