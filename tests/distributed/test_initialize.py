"""One model, bit by bit, however it is sharded."""

import pytest
import torch

from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.slow import slow
from tests.helpers.tiny import TIED, TINY, parallel_model, plain_model, whole


def _compare_with_plain(dims: ParallelDims, args, dtype: torch.dtype = torch.float32) -> None:
    sharded, _ = parallel_model(
        dims, args, param_dtype=dtype, master_dtype=dtype, microbatches=(dims.pp, 1)
    )
    plain = plain_model(args)
    wanted = dict(plain.named_parameters())
    for name, got in sharded.named_parameters():
        assert got.dtype == dtype
        assert torch.equal(whole(got), wanted[name].to(dtype)), name
    for stage in sharded.stages:
        for (name, want), got in zip(plain.named_buffers(), stage.buffers(), strict=True):
            assert torch.equal(got, want), name
    held = {*dict(sharded.named_parameters())}
    assert held == {*wanted} or dims.pp > 1


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("replicate", "shard", "cp", "tp"),
    [
        *[(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 1)],
        *slow((1, 4, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1)),
    ],
)
def test_initial_weights_do_not_depend_on_the_mesh(
    on_ranks, replicate, shard, cp, tp, args
) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    on_ranks(replicate * shard * cp * tp, _compare_with_plain, dims, args)


@pytest.mark.parametrize(("shard", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_initial_weights_in_bf16_are_those_in_fp32_rounded(on_ranks, shard, tp, pp) -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=shard, tp=tp, pp=pp)
    on_ranks(shard * tp * pp, _compare_with_plain, dims, TINY, torch.bfloat16)
