"""Where the tensors of a rank's part of the model are, and of which type."""

import dataclasses
import functools
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.local_model import allocate, build_local_model
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.shards import boxes_of_ranks, is_dtensor, is_fsdp
from tests.helpers.tiny import SEQ_LEN, TINY, fake_ranks


def test_buffers_may_be_elsewhere_than_parameters() -> None:
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
    allocate(model, parameters=cpu, buffers=elsewhere)
    assert {parameter.device for parameter in model.parameters()} == {cpu}
    assert {buffer.device for buffer in model.buffers()} == {elsewhere}
    assert not any("cos" in name for name in model.state_dict())


def one_rank() -> Mock:
    """Meshes with a rank along each axis."""
    meshes = Mock(experts=None, ep=None)
    meshes.pp.get_local_rank.return_value = 0
    for axis in (meshes.pp, meshes.tp, meshes.cp, meshes.world, meshes.fsdp):
        axis.size.return_value = axis.ndim = 1
    return meshes


def test_a_module_in_fp32_is_not_all_whose_names_begin_as_its_own() -> None:
    args = dataclasses.replace(TINY, n_layers=11)
    model = build_local_model(
        functools.partial(Decoder, args, SEQ_LEN),
        lambda stage: None,
        [args.table.module_names],
        fp32_modules=["layers.1"],
        meshes=one_rank(),
        training=Training(dtype="bfloat16"),
        schedule="1F1B",
        device=torch.device("cpu"),
    )
    in_fp32 = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert in_fp32 == {n for n in args.table.parameters if n.startswith("layers.1.")}


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
        boxes = [boxes_of_ranks(m.shape, m.device_mesh, m.placements) for m in matrices]
    assert boxes[0][300] == ((8 * 37, 16 * 4), (8, 16))
    assert all(one == boxes[0] for one in boxes)
    assert len(asked) == 512
