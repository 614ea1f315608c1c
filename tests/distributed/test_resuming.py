"""Resumes of a real model and optimizer: to the same bits, or not, where that was asked for; and
the names under which a checkpoint holds them."""

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.manager import CheckpointManager
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.distributed.test_manager import make, select
from tests.distributed.test_resharding import held
from tests.helpers.checkpoints import BARE
from tests.helpers.files import contents
from tests.helpers.job import SCHEDULES, Job, assert_equal, frozen, mesh
from tests.helpers.needs import needs_compiler
from tests.helpers.rounding import adamw
from tests.helpers.tiny import TINY

FSDP = ParallelDims(dp_replicate=1, dp_shard=2)
LAST = 8


def save(manager: CheckpointManager, job: Job, step: int, **manifest: object) -> None:
    manager.save(step, job.tensors, BARE | {"step": step} | manifest, is_last=False)


def load(manager: CheckpointManager, job: Job, step: int) -> None:
    manager.load(job.tensors, select(manager, step))


def _run(folder: str, ends: list[int], dims: ParallelDims, options: dict) -> None:
    """Train, each part as if by a process of its own, which begins in another state."""
    manager, begin = make(folder), 0
    for end in ends:
        torch._dynamo.reset()
        torch.manual_seed(10 * begin + dist.get_rank())
        job = Job(dims, seed=begin, num_microbatches=2, **options)
        if begin:
            load(manager, job, begin)
        for step in range(begin + 1, end + 1):
            job.take_step(step)
            torch.rand(1 + dist.get_rank())  # the model draws no numbers
        save(manager, job, end)
        dist.barrier()
        begin = end


THRICE, ONCE = [2, 4, 6, LAST], [4, LAST]
AOT, INDUCTOR = ({"compile_backend": backend} for backend in ("aot_eager", "inductor"))


@pytest.mark.parametrize(
    ("dims", "options", "ends"),
    [
        (FSDP, {}, THRICE),
        # each start compiles again
        pytest.param(FSDP, AOT, ONCE, marks=pytest.mark.slow),
        # its kernels take half a minute where torch has not kept them
        pytest.param(FSDP, INDUCTOR, THRICE, marks=[needs_compiler, pytest.mark.slow]),
        (mesh(pp=2), SCHEDULES["1F1B"], THRICE),
    ],
    ids=["fsdp", "fsdp-compiled", "fsdp-inductor", "pp"],
)
def test_a_resumed_job_is_the_same_to_the_bit(on_ranks, dims, options, ends, tmp_path) -> None:
    """Every byte of the last checkpoint: weights, optimizer and generators of all ranks."""
    for name, parts in {"whole": [LAST], "resumed": ends}.items():
        on_ranks(2, _run, str(tmp_path / name), parts, dims, options)
    want = contents(tmp_path / "whole" / f"step-{LAST}")
    got = contents(tmp_path / "resumed" / f"step-{LAST}")
    assert len(want) == 2 + 2
    assert [name for name in want | got if got.get(name) != want.get(name)] == []


@pytest.mark.ranks(2)
def test_a_resume_in_another_dtype_rounds_weights_and_optimizer(tmp_path: Path) -> None:
    """Once, to the nearest; into fp32 nothing is lost."""
    for number, (before, after) in enumerate(
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ):
        jobs = [
            Job(FSDP, seed, param_dtype=torch.bfloat16, master_dtype=dtype)
            for seed, dtype in enumerate((before, after))
        ]
        manager = make(f"{tmp_path}/{number}")
        for step in (1, 2):
            jobs[0].take_step(step)
        save(manager, jobs[0], 2)
        dist.barrier()
        saved = held(jobs[0])
        load(manager, jobs[1], 2)
        found = held(jobs[1])
        for name, tensor in saved.items():
            is_count = name.endswith(".step")
            assert tensor.dtype == (torch.float32 if is_count else before), name
            assert torch.equal(found[name], tensor if is_count else tensor.to(after)), name
            assert found[name].dtype == (torch.float32 if is_count else after), name
        jobs[1].take_step(3)
        now = held(jobs[1])
        assert all(now[name].dtype == tensor.dtype for name, tensor in found.items())
        assert all(tensor.isfinite().all() for tensor in now.values())
        assert now["optimizer.state.norm.weight.step"] == 3


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_not_loaded_begins_anew_once(tmp_path: Path) -> None:
    manager, job = make(str(tmp_path)), Job(FSDP)
    for step in (1, 2):
        job.take_step(step)
    save(manager, job, 2)
    dist.barrier()
    want, got = Job(FSDP, seed=1), Job(FSDP, seed=1)
    load(manager, want, 2)
    want.trainer.optimizer = adamw(want.model)
    excluding = make(str(tmp_path), exclude_from_loading=["optimizer"])
    load(excluding, got, 2)
    assert_equal(got.weights(), want.weights())
    for job in (want, got):
        job.take_step(3)
    assert_equal(got.weights(), want.weights())
    assert held(got)["optimizer.state.norm.weight.step"] == 1
    # a checkpoint of that job: it is started again, with the same config
    config = {"checkpoint": {"exclude_from_loading": ["optimizer"]}}
    save(excluding, got, 3, config=config)
    dist.barrier()
    again = Job(FSDP, seed=1)
    load(excluding, again, 3)
    assert_equal(held(again), held(got))


def keys(trained: Collection[str]) -> set[str]:
    """Of a checkpoint of the tiny model, `trained` being the names of its trained parameters."""
    states = ("step", "exp_avg", "exp_avg_sq")
    return {
        f"rng.cpu.rank_{dist.get_rank()}",
        *(f"model.{name}" for name in TINY.table.parameters),
        *(f"optimizer.state.{name}.{state}" for name in trained for state in states),
    }


@pytest.mark.ranks(2)
def test_frozen_parameters_are_saved_without_optimizer_state(tmp_path: Path) -> None:
    options = frozen("tok_embeddings.*", "layers.0.*", "*norm.weight")
    dims = mesh(dp_shard=2)
    job = Job(dims, **options)
    job.take_step(1)
    trained = set(TINY.table.parameters) - options["frozen"]
    assert job.tensors.state_dict().keys() == keys(trained)
    job.save(tmp_path)
    job.take_step(2)
    resumed = Job(dims, seed=1, **options)
    resumed.load(tmp_path)
    resumed.take_step(2)
    assert_equal(resumed.weights(), job.weights())


@pytest.mark.ranks(2)
def test_a_resume_may_begin_or_end_to_step_early(tmp_path: Path) -> None:
    """Every other way to take the two steps, one before a resume and one after."""
    dims = mesh(dp_shard=2)
    ends = []
    for first in (False, True):
        job = Job(dims, is_early=first)
        job.take_step(1)
        names = {*job.tensors.state_dict()}
        assert names == keys(set(TINY.table.parameters))
        job.save(f"{tmp_path}/{first}")
        for second in (False, True):
            resumed = Job(dims, seed=1, is_early=second)
            resumed.load(f"{tmp_path}/{first}")
            resumed.take_step(2)
            ends.append(resumed.weights())
    for end in ends[1:]:
        assert_equal(end, ends[0])
