"""What tensor parallelism refuses, without other ranks."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshwright.config.job_config import JobConfig
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.tensor_parallel import apply_tp
from scripts.draw_diagrams import SIZE, owner
from tests.helpers.job import mesh
from tests.helpers.resolved import broken
from tests.helpers.tiny import SEQ_LEN, TINY, fake_ranks


def test_a_parameter_without_a_layout_is_named() -> None:
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
        model.layers["1"].attention.q_norm = nn.RMSNorm(8)
    says = r"layers\.1\.attention\.q_norm\.weight has no layout"
    with fake_ranks(2), pytest.raises(ValueError, match=says):
        apply_tp(model, build_meshes(mesh(tp=2), "cpu").tp)


def test_the_drawing_of_pieces_cuts_as_the_model_is_cut() -> None:
    """docs/images/pieces.svg: 8 x 8 elements of a matrix with FSDP2 and tensor parallelism."""
    with fake_ranks(4):
        meshes = build_meshes(mesh(dp_shard=2, tp=2), "cpu")
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


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_rank_without_rows_of_the_vocabulary_is_refused(degree: int) -> None:
    """As torch cuts them: of 9 rows, four ranks would get 3, 3, 3 and none."""
    config = JobConfig(parallelism={"tensor_parallel_degree": degree})
    for rows in range(1, 70):
        args = LlamaArgs(16, 1, n_heads=8, n_kv_heads=8, hidden_dim=8, vocab_size=rows)
        if len(torch.empty(rows).chunk(degree)) == degree:
            assert not broken(config, model=args)
            continue
        said = broken(config, model=args)
        assert f"model.args.vocab_size = {rows}, for each rank leave none" in said
        advice = said.partition("set model.args.vocab_size = ")[2]
        assert len(torch.empty(int(advice.partition(",")[0])).chunk(degree)) == degree
