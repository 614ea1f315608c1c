"""What tensor parallelism refuses, without other ranks."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.config.job_config import JobConfig
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import ParallelDims, check_divisible
from meshwright.parallelisms.tensor_parallel import apply_tp
from meshwright.system.errors import ConfigError
from scripts.draw_diagrams import SIZE, owner
from tests.helpers.tiny import SEQ_LEN, TIED, TINY


@pytest.fixture
def _two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_two_ranks")
def test_a_parameter_without_a_layout_is_named() -> None:
    meshes = build_meshes(ParallelDims(dp_replicate=1, dp_shard=1, tp=2), "cpu")
    for args in (TINY, TIED):
        with torch.device("meta"):
            model = Decoder(args, SEQ_LEN)
        apply_tp(model, meshes.tp)
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
        model.layers["1"].attention.q_norm = nn.RMSNorm(8)
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.q_norm\.weight has no layout"):
        apply_tp(model, meshes.tp)


def test_the_drawing_of_pieces_cuts_as_the_model_is_cut() -> None:
    """docs/images/pieces.svg: 8 x 8 elements of a matrix with FSDP2 and tensor parallelism."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        meshes = build_meshes(ParallelDims(dp_replicate=1, dp_shard=2, tp=2), "cpu")
        with torch.device("meta"):
            model = Decoder(dataclasses.replace(TINY, dim=SIZE, n_layers=1, n_heads=2), SEQ_LEN)
        apply_tp(model, meshes.tp)
        fully_shard(model, mesh=meshes.fsdp)
        weights = dict(model.named_parameters())
        for kind, name in (("rows", "attention.wq"), ("columns", "attention.wo")):
            weight = weights[f"layers.0.{name}.weight"]
            rows, columns = weight.to_local().shape
            places = [(i, j) for i in range(SIZE) for j in range(SIZE) if owner(kind, i, j) == 0]
            assert places == [(i, j) for i in range(rows) for j in range(columns)]
            # FSDP2 cuts rows in any case: of a tensor that tp has cut before
            assert [placement.dim for placement in weight.placements] == [0, kind == "columns"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_rank_without_rows_of_the_vocabulary_is_refused(degree: int) -> None:
    """As torch cuts them: of 9 rows, four ranks would get 3, 3, 3 and none."""
    config = JobConfig(parallelism={"tensor_parallel_degree": degree})
    for rows in range(1, 70):
        args = LlamaArgs(16, 1, n_heads=8, n_kv_heads=8, hidden_dim=8, vocab_size=rows)
        if len(torch.empty(rows).chunk(degree)) == degree:
            check_divisible(config, args.table)
            continue
        rule = rf"model\.args\.vocab_size = {rows}, for each rank leave none"
        with pytest.raises(ConfigError, match=rule) as error:
            check_divisible(config, args.table)
        advice = str(error.value).partition("set model.args.vocab_size = ")[2]
        assert len(torch.empty(int(advice.partition(",")[0])).chunk(degree)) == degree
