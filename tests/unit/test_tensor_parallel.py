"""What tensor parallelism refuses, without other ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.models.decoder import Decoder
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.parallelisms.tensor_parallel import apply_tp
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
