"""What a checkpoint holds: under which names, and that it brings back the same bits."""

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.job import Job, assert_equal, frozen, mesh
from tests.helpers.tiny import TINY


def keys(trained: Collection[str]) -> set[str]:
    """Of a checkpoint of the tiny model, `trained` being the names of its trained parameters."""
    states = ("step", "exp_avg", "exp_avg_sq")
    return {
        f"rng.cpu.rank_{dist.get_rank()}",
        *(f"model.{name}" for name in TINY.parameter_names()),
        *(f"optimizer.state.{name}.{state}" for name in trained for state in states),
    }


@pytest.mark.ranks(2)
def test_frozen_parameters_are_saved_without_optimizer_state(tmp_path: Path) -> None:
    options = frozen("tok_embeddings.*", "layers.0.*", "*norm.weight")
    dims = mesh(dp_shard=2)
    job = Job(dims, **options)
    job.take_step(1)
    trained = set(TINY.parameter_names()) - options["frozen"]
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
        assert names == keys(set(TINY.parameter_names()))
        job.save(f"{tmp_path}/{first}")
        for second in (False, True):
            resumed = Job(dims, seed=1, is_early=second)
            resumed.load(f"{tmp_path}/{first}")
            resumed.take_step(2)
            ends.append(resumed.weights())
    for end in ends[1:]:
        assert_equal(end, ends[0])


def _resumed(jobs: list[Job], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights after two steps, of which the second is taken again from a checkpoint."""
    for job in jobs:
        job.take_step(1)
    for number, job in enumerate(jobs):
        job.save(f"{folder}/{number}")
    for job in jobs:
        job.take_step(2)
    for number, job in enumerate(jobs):
        job.load(f"{folder}/{number}")
        job.take_step(2)
    return [job.weights() for job in jobs]


@pytest.mark.ranks(2)
def test_two_models_in_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    both = mesh(tp=2), mesh(dp_shard=2)
    together = _resumed([Job(dims, seed) for seed, dims in enumerate(both)], tmp_path / "both")
    for seed, dims in enumerate(both):
        (alone,) = _resumed([Job(dims, seed)], tmp_path / f"{seed}")
        assert_equal(together[seed], alone)
