"""One model, bit by bit, however it is sharded."""

import pytest
import torch

from meshwright.parallelisms.parallel_dims import ParallelDims
from tests.helpers.tiny import TIED, TINY, parallel_llama, plain_llama, whole


def _compare_with_plain(dims: ParallelDims, args) -> None:
    sharded, _ = parallel_llama(dims, args)
    plain = plain_llama(args)
    wanted = dict(plain.named_parameters())
    for name, got in sharded.named_parameters():
        assert torch.equal(whole(got), wanted[name]), name
    for stage in sharded.stages:
        for (name, want), got in zip(plain.named_buffers(), stage.buffers(), strict=True):
            assert torch.equal(got, want), name
    held = {*dict(sharded.named_parameters())}
    assert held == {*wanted} or dims.pp > 1


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("replicate", "shard", "cp", "tp"),
    [
        *[(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1)],
        *[(1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 1), (1, 2, 2, 1), (2, 1, 2, 1)],
    ],
)
def test_initial_weights_do_not_depend_on_the_mesh(
    on_ranks, replicate, shard, cp, tp, args
) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    on_ranks(replicate * shard * cp * tp, _compare_with_plain, dims, args)
