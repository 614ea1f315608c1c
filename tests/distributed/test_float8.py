"""Float8 layers on two ranks, emulated, against one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from meshwright.commands.prove.compare import BOUNDS
from meshwright.config.parallelism import Float8
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.faults import FAULTS
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import SEQ_LEN, TINY, parallel_model, whole

ONE, SHARDS, HALVES = mesh(), mesh(dp_shard=2), mesh(tp=2)
SAME_NUMBERS, OTHER_NUMBERS = BOUNDS["float8 sums"], BOUNDS["float8"]
Figures = tuple[float, dict[str, torch.Tensor]]


def train(
    dims: ParallelDims, recipe: str, size: int, fault: str, options: dict[str, Any]
) -> Figures:
    """Loss and whole gradients of four sequences, `size` at a time on each rank.

    Args:
        recipe: "": fp32.
    """
    torch.compiler.reset()
    with FAULTS[fault]():
        return _train(dims, recipe, size, options)


def _train(dims: ParallelDims, recipe: str, size: int, options: dict[str, Any]) -> Figures:
    float8 = Float8(enable=bool(recipe), recipe_name=recipe or "rowwise", emulate=True)
    dtype = torch.bfloat16 if recipe else torch.float32
    local, meshes = parallel_model(dims, param_dtype=dtype, float8=float8, **options)
    (model,) = local.stages
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (4, SEQ_LEN + 1), generator=generator)
    loss = torch.zeros(())
    for part in tokens.chunk(meshes.dp.size())[meshes.dp.get_local_rank()].split(size):
        summed = model(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()
        summed.backward()
        loss += summed.detach()
    dist.all_reduce(loss, group=meshes.dp.get_group())
    gradients = {name: whole(p.grad) for name, p in local.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.fixture
def run(on_ranks):
    def run(
        dims: ParallelDims,
        recipe: str = "rowwise",
        size: int = 1,
        fault: str = "none",
        **options: Any,
    ) -> Figures:
        return on_ranks(dims.num_ranks, train, dims, recipe, size, fault, options)[0]

    return run


def errors(got: Figures, wanted: Figures) -> tuple[float, dict[str, float]]:
    """Relative, of the loss and of each gradient."""
    assert got[1].keys() == wanted[1].keys()
    return abs(got[0] / wanted[0] - 1), {
        name: ((got[1][name] - gradient).norm() / gradient.norm()).item()
        for name, gradient in wanted[1].items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"ac_mode": "selective"},
        *slow(
            {"enable_cpu_offload": True, "frozen": ["layers.1.feed_forward.w1.weight"]},
            {"fp32_modules": ["layers.1"]},
        ),
    ],
    ids=["recomputed", "offloaded, partly frozen", "a block in fp32"],
)
def test_two_shards_multiply_the_same_numbers(run, options) -> None:
    loss, gradients = errors(run(SHARDS, **options), run(ONE, **options))
    assert loss <= SAME_NUMBERS.loss
    assert max(gradients.values()) <= SAME_NUMBERS.gradient


@pytest.mark.slow
def test_halves_of_matrices_are_off_by_rounding(run) -> None:
    one = run(ONE)
    _, roundings = errors(run(ONE, ""), one)

    def are_within(found: Figures) -> bool:
        loss, gradients = errors(found, one)
        assert loss > 0
        return loss <= OTHER_NUMBERS.loss and all(
            error <= OTHER_NUMBERS.gradient + OTHER_NUMBERS.rounding * roundings[name]
            for name, error in gradients.items()
        )

    assert are_within(run(HALVES))
    assert are_within(run(HALVES, compile_backend="aot_eager"))
    assert not are_within(run(HALVES, fault="no_sum_over_tp"))


@pytest.mark.ranks(2)
def test_halves_have_the_scales_of_whole_rows() -> None:
    """Of input and weight for 2 products cut along the sum; of weight and gradient for 3 others."""
    float8 = Float8(enable=True, emulate=True)
    local, _ = parallel_model(HALVES, param_dtype=torch.bfloat16, float8=float8)
    (model,) = local.stages
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with CommDebugMode() as communication:
        model(tokens, tokens).backward()
    count = communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    gradients_of_norms = 2 * TINY.n_layers + 1
    assert count == 10 * TINY.n_layers + gradients_of_norms
