"""Whether something is sharded, while torch's modules are imported or are not; and where."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.shards import boxes_of_ranks, is_dtensor, is_fsdp
from tests.helpers.tiny import fake_ranks


@pytest.mark.parametrize("is_begun", [True, False])
def test_before_torchs_modules_are_imported_nothing_is_sharded(monkeypatch, is_begun: bool) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        if is_begun:  # by another thread, which has not come to the classes
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)
    assert not is_dtensor(torch.zeros(1))
    assert not is_fsdp(nn.Linear(1, 1))


def test_torch_tells_once_where_512_ranks_hold_matrices_of_one_kind(monkeypatch) -> None:
    """It takes 0.3 s, and a model has hundreds: Muon on a cluster took minutes to begin."""
    from torch.distributed.tensor import DTensor, Shard, _utils

    asked, name = [], "_compute_local_shape_and_global_offset"
    ask = getattr(_utils, name)
    monkeypatch.setattr(_utils, name, lambda *of: asked.append(of) or ask(*of))
    with fake_ranks(512, 300):
        meshes = build_meshes(ParallelDims(dp_replicate=1, dp_shard=64, tp=8), "cpu")
        mesh = meshes.parameters["fsdp", "tp"]
        matrices = [
            DTensor.from_local(torch.empty(8, 16), mesh, [Shard(0), Shard(1)], run_check=False)
            for _ in range(5)
        ]
        boxes = [boxes_of_ranks(matrix) for matrix in matrices]
    assert boxes[0][300] == ((8 * 37, 16 * 4), (8, 16))
    assert all(one == boxes[0] for one in boxes)
    assert len(asked) == 512
