"""Blocks and the loss are compiled in the first step, and never again."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.models.llama import LlamaArgs
from meshwright.parallelisms.parallel_dims import ParallelDims
from tests.distributed.test_state_dict import Job
from tests.helpers.tiny import TINY

MESHES = {
    "fsdp": ParallelDims(dp_replicate=1, dp_shard=2),
    "hsdp": ParallelDims(dp_replicate=2, dp_shard=2),
    "2d": ParallelDims(dp_replicate=1, dp_shard=2, tp=2),
    "cp": ParallelDims(dp_replicate=1, dp_shard=1, cp=2),
    "pp": ParallelDims(dp_replicate=1, dp_shard=1, pp=2),
}
RANKS = {name: dims.dp * dims.cp * dims.tp * dims.pp for name, dims in MESHES.items()}
AC = {
    "none": {"ac_mode": "none"},
    "op": {"ac_mode": "selective"},
    "full": {"ac_mode": "full"},
    "budget": {"ac_mode": "memory_budget"},
}
CASES = [(mesh, ac) for mesh in MESHES for ac in ("none", "op", "full")] + [("fsdp", "budget")]
CASES.remove(("2d", "full"))
LOSS = 2  # graphs of the loss, where it is computed


def first_graphs(dims: ParallelDims, of_blocks: int = 1) -> list[int]:
    """Of the first step on each rank: the last stage has the loss."""
    others = 0 if dims.pp == 1 else 1
    return [of_blocks] * others + [of_blocks + LOSS] * (
        dims.dp * dims.cp * dims.tp * dims.pp - others
    )


class Graphs:
    """Counts those compiled since it was last asked."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self._seen = 0

    def new(self) -> int:
        before, self._seen = self._seen, counters["stats"]["unique_graphs"]
        return self._seen - before


def graphs_of_steps(
    dims: ParallelDims, options: dict, steps: int, folder: str, args: LlamaArgs = TINY
) -> tuple[int, int]:
    """Graphs compiled in the first step of two microbatches, and in all that follow; a checkpoint
    is written after the second."""
    graphs = Graphs()
    job = Job(dims, num_microbatches=2, args=args, compile_backend="aot_eager", **options)
    job.take_step(1)
    first = graphs.new()
    for step in range(2, steps + 1):
        job.take_step(step)
        if step == 2:
            job.save(folder)
    return first, graphs.new()


@pytest.mark.parametrize(("mesh", "ac"), CASES)
def test_graphs_in_the_first_step_and_none_later(on_ranks, mesh, ac, tmp_path) -> None:
    steps = 50 if (mesh, ac) == ("fsdp", "op") else 4
    arguments = MESHES[mesh], AC[ac], steps, str(tmp_path)
    wanted = [(first, 0) for first in first_graphs(MESHES[mesh])]
    assert on_ranks(RANKS[mesh], graphs_of_steps, *arguments) == wanted


def test_one_graph_for_all_layers_of_a_deep_model(on_ranks, tmp_path) -> None:
    """More than torch compiles of one function before it gives up."""
    deep = dataclasses.replace(TINY, n_layers=torch._dynamo.config.recompile_limit + 2)
    for mesh in ("fsdp", "cp"):
        arguments = MESHES[mesh], AC["op"], 2, str(tmp_path / mesh), deep
        assert on_ranks(2, graphs_of_steps, *arguments) == [(1 + LOSS, 0)] * 2


def test_fp32_blocks_have_a_graph_and_the_others_one(on_ranks, tmp_path) -> None:
    options = {"param_dtype": torch.bfloat16, "fp32_modules": ("layers.0", "layers.1")}
    arguments = MESHES["fsdp"], options, 2, str(tmp_path)
    assert on_ranks(2, graphs_of_steps, *arguments) == [(2 + LOSS, 0)] * 2


def _graphs_of_evaluation(dims: ParallelDims) -> list[int]:
    graphs = Graphs()
    job = Job(dims, compile_backend="aot_eager")
    counts = []
    for step in (1, 2):
        job.take_step(step)
        counts.append(graphs.new())
        with torch.no_grad():
            for _ in range(2):
                job.forward(step)
                counts.append(graphs.new())
    return counts


def test_a_forward_without_gradient_is_compiled_once_more(on_ranks) -> None:
    for mesh in ("fsdp", "2d"):
        want = [1 + LOSS, 1, 0, 0, 0, 0]
        assert on_ranks(RANKS[mesh], _graphs_of_evaluation, MESHES[mesh]) == [want] * RANKS[mesh]
