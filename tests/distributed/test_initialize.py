"""One model, bit by bit, however it is sharded."""

import dataclasses

import pytest
import torch

from meshwright.parallelisms.parallel_dims import ParallelDims
from tests.helpers.tiny import TINY, parallel_llama, plain_llama

TIED = dataclasses.replace(TINY, tie_embeddings=True)


def _compare_with_plain(dims: ParallelDims, args) -> None:
    sharded, _ = parallel_llama(dims, args)
    whole = plain_llama(args)
    for (name, want), got in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(got.full_tensor(), want), name
    for (name, want), got in zip(whole.named_buffers(), sharded.buffers(), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)])
def test_initial_weights_do_not_depend_on_the_mesh(on_ranks, replicate, shard, args) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard)
    on_ranks(replicate * shard, _compare_with_plain, dims, args)
