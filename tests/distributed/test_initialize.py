"""One model, bit by bit, however it is sharded: also with copies, a tied output, or in bf16."""

import pytest
import torch

from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import TIED, TINY, parallel_model, plain_model, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dims", "args"),
    [
        *((mesh(1, 2, tp=2), TINY), (mesh(2), TIED), (mesh(tp=2), TIED), (mesh(pp=2), TINY)),
        *slow((mesh(dp_shard=4), TIED), (mesh(2, 2), TINY), (mesh(2, cp=2), TINY)),
    ],
    ids=str,
)
@pytest.mark.ranks("dims")
def test_initial_weights_do_not_depend_on_the_mesh(dims: ParallelDims, args, dtype) -> None:
    """In bf16 they are those in fp32, rounded."""
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
