"""What tensor parallelism refuses, without other ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.config.job_config import JobConfig
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import ParallelDims, check_divisible
from meshwright.parallelisms.tensor_parallel import apply_tp
from meshwright.system.errors import ConfigError
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
