"""Every registered family on meshes, against one device: a registered family gets these tests."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.loss import Batch
from meshwright.parallelisms.initialize import fill_normal
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.rules.degrees import ParallelDims, shards_experts_apart
from meshwright.parallelisms.shards import local_box
from meshwright.parallelisms.tensor_parallel import NormOverRanks
from tests.campaigns.new_user import example
from tests.helpers.families import small
from tests.helpers.job import Job
from tests.helpers.packed import packed
from tests.helpers.slow import slow
from tests.helpers.tiny import SEQ_LEN, meshes_of, plain_model

OWN: dict[str, Any] = {}
exec(example("sigmoid"), OWN)
FAMILIES = MODELS | OWN["MODELS"]
"""With the one of docs/extending.md whose layers have parts that no registered family has."""
ARGS = {name: small(family, vocab_size=131) for name, family in FAMILIES.items()}
OPTIONS = {
    "plain": {},
    "full": {"ac_mode": "full"},
    "op": {"ac_mode": "selective", "selective_ac_option": "op"},
    "compiled": {"compile_backend": "aot_eager"},
    "packed": {},
}
CASES = {
    "each axis": (
        ({"dp_shard": 2}, "full"),
        *(({axis: 2}, "packed") for axis in ("tp", "cp", "pp")),
    ),
    "2 ranks": (
        ({"dp_shard": 2}, "packed"),
        *(({"tp": 2}, option) for option in ("plain", "op", "compiled")),
        *(({"cp": 2}, option) for option in ("op", "plain")),
        ({"pp": 2}, "compiled"),
    ),
    "4 ranks": (({"cp": 2, "tp": 2}, "plain"), ({"pp": 2, "tp": 2}, "full")),
}
"""Meshes and options; `packed` is documents that are kept apart."""
TOLERANCE = 1e-5
"""Of the largest gradient of a parameter: fp32, added up in another order."""


def stir(model: Decoder | LocalModel) -> None:
    """Other values than ones in every norm, the same however it is sharded: a gradient that does
    not know its own weight is then wrong. Where a norm multiplies by 1 + w, w is what differs."""
    table = model.table if isinstance(model, Decoder) else model.stages[0].table
    for name, parameter in model.named_parameters():
        if "norm" in name:
            local, offset = local_box(parameter.detach())
            fill_normal(local, 0.3, 1, name, tuple(parameter.shape), offset)
            local.add_(0 if table.parameters[name].is_offset else 1)


ALL = [(family, cases, 4 if "4" in cases else 2) for cases in CASES for family in FAMILIES]
EVERYDAY = [("qwen3_moe", "each axis", 2), ("deepseek_v3", "each axis", 2)]
"""Llama's meshes: tests/distributed/test_step.py."""


@functools.cache
def reference(family: str, is_packed: bool) -> tuple[float, dict[str, torch.Tensor]]:
    batch, model = batch_of(is_packed), plain_model(ARGS[family])
    stir(model)
    logits = model(batch.tokens, documents=batch.documents)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(family: str, dims: ParallelDims, options: dict, is_packed: bool) -> None:
    """Initial values to the bit; then loss, and the gradient of every parameter."""
    torch.compiler.reset()  # a job compiles one model, of one shape
    batch = batch_of(is_packed)
    want_loss, wanted = reference(family, is_packed)
    job = Job(dims, 0, dims.pp, args=ARGS[family], **options)
    initial = dict(plain_model(ARGS[family]).named_parameters())
    for name, weight in job.weights().items():
        assert torch.equal(weight, initial[name]), name
    stir(job.model)
    gradients = job.whole_gradients()
    result = job.take_step(1, job.part(batch))
    what = f"{family} on {dims}, {options}"
    assert result.loss.item() == pytest.approx(want_loss, rel=2e-6), what
    for name, got in gradients.items():
        error = (got - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error <= TOLERANCE, f"{what}: gradient of {name} is {error:.1e} off"


def batch_of(is_packed: bool) -> Batch:
    if is_packed:
        return packed(1)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(131, (2, 8, SEQ_LEN), generator=generator)
    return Batch(tokens, labels, None)


@pytest.mark.parametrize(
    ("family", "cases", "ranks"),
    [*EVERYDAY, *slow(*(one for one in ALL if one not in EVERYDAY))],
)
@pytest.mark.ranks("ranks")
def test_a_mesh_has_the_initial_values_loss_and_gradients_of_one_device(
    family, cases, ranks
) -> None:
    for mesh, option in CASES[cases]:
        axes = {"dp_replicate": 1, "dp_shard": 1, "ep": int(bool(ARGS[family].table.mixtures))}
        dims = ParallelDims(**(axes | mesh))
        if dims.has_own_experts and not shards_experts_apart():
            continue
        compare(family, dims, OPTIONS[option], is_packed=option == "packed")


@pytest.mark.ranks(2)
def test_a_norm_over_ranks_is_computed_in_fp32() -> None:
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, tp=2), "cpu").tp
    generator, norm = torch.Generator().manual_seed(0), torch.nn.RMSNorm(64, eps=1e-6)
    x = torch.randn(2, 50, 64, generator=generator).bfloat16()
    got, want = (
        NormOverRanks(norm, mesh)(x.chunk(2, -1)[mesh.get_local_rank()]),
        norm(x.float()).bfloat16().chunk(2, -1)[mesh.get_local_rank()],
    )
    assert got.dtype == torch.bfloat16
    assert (got != want).float().mean() < 0.01  # sums in another order
