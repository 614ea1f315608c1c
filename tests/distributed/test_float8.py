"""Float8 layers on two ranks, emulated, against one; more meshes are in test_prove.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from meshwright.commands.prove.bounds import BOUNDS
from meshwright.config.parallelism import Float8
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import SEQ_LEN, TINY, parallel_model, whole

FLOAT8 = {"param_dtype": torch.bfloat16, "float8": Float8(enable=True, emulate=True)}


def train(dims: ParallelDims, options: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients of four sequences, one at a time on each rank."""
    torch.compiler.reset()
    local, meshes = parallel_model(dims, **FLOAT8, **options)
    (model,) = local.stages
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (4, SEQ_LEN + 1), generator=generator)
    loss = torch.zeros(())
    for part in tokens.chunk(meshes.dp.size())[meshes.dp.get_local_rank()].split(1):
        summed = model(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()
        summed.backward()
        loss += summed.detach()
    dist.all_reduce(loss, group=meshes.dp.get_group())
    gradients = {name: whole(p.grad) for name, p in local.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize(
    "options",
    [
        {"ac_mode": "selective"},
        *slow({"enable_cpu_offload": True, "frozen": ["layers.1.feed_forward.w1.weight"]}),
    ],
    ids=["recomputed", "offloaded, partly frozen"],
)
def test_two_shards_multiply_the_same_numbers(on_ranks, options) -> None:
    (loss, gradients), (want_loss, wanted) = (
        on_ranks(dims.num_ranks, train, dims, options)[0] for dims in (mesh(dp_shard=2), mesh())
    )
    bounds = BOUNDS["float8 sums"]
    assert loss == pytest.approx(want_loss, rel=bounds.loss)
    assert gradients.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (gradients[name] - want).norm() <= bounds.gradient * want.norm(), name


@pytest.mark.ranks(2)
def test_halves_have_the_scales_of_whole_rows() -> None:
    """Of input and weight for 2 products cut along the sum; of weight and gradient for 3 others."""
    local, _ = parallel_model(mesh(tp=2), **FLOAT8)
    (model,) = local.stages
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with CommDebugMode() as communication:
        model(tokens, tokens).backward()
    count = communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    gradients_of_norms = 2 * TINY.n_layers + 1
    assert count == 10 * TINY.n_layers + gradients_of_norms
