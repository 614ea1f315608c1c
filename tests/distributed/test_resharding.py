"""A checkpoint of one mesh is the same state on another, and goes on as it would have there."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.system.files import NamedPath
from tests.helpers.job import DEEP, SCHEDULES, Job, assert_equal, mesh
from tests.helpers.rounding import assert_updated_alike
from tests.helpers.slow import slow_but
from tests.helpers.tiny import MIXED, whole

Tensors = dict[str, torch.Tensor]
EXPERTS = {"args": MIXED, "balance_loss": 0.5, "bias_update_rate": 0.01}

MESHES = {
    "fsdp2": (mesh(dp_shard=2), {}),
    "tp2": (mesh(tp=2), {}),
    "fsdp4": (mesh(dp_shard=4), {}),
    "hsdp": (mesh(dp_replicate=2, dp_shard=2), {}),
    "2d": (mesh(dp_shard=2, tp=2), {}),
    "cp-tp": (mesh(cp=2, tp=2), {}),
    "pp-interleaved": (mesh(dp_shard=2, pp=2), SCHEDULES["Interleaved1F1B"]),
    "pp-zbv": (mesh(dp_shard=2, pp=2), SCHEDULES["ZBVZeroBubble"]),
    "moe": (mesh(ep=1), EXPERTS),
    "moe-ep4": (mesh(dp_shard=4, ep=4), EXPERTS),
    "moe-tp-ep": (mesh(tp=2, ep=2), EXPERTS),
    "moe-fsdp-tp-ep": (mesh(dp_shard=2, tp=2, ep=2), EXPERTS),
    "moe-hsdp": (mesh(dp_replicate=2, dp_shard=2, ep=2), EXPERTS),
}
PAIRS = {  # every axis is entered and left
    f"{source}->{target}": (source, target)
    for source, target in (
        ("2d", "pp-interleaved"),
        ("hsdp", "pp-zbv"),
        ("fsdp4", "cp-tp"),
        ("pp-interleaved", "fsdp2"),
        ("hsdp", "tp2"),
        ("moe-ep4", "moe-tp-ep"),
        ("moe-tp-ep", "moe-fsdp-tp-ep"),
        ("moe-hsdp", "moe-ep4"),
        ("moe", "moe-tp-ep"),
        ("moe-tp-ep", "moe"),
    )
}
EVERYDAY = "2d->pp-interleaved pp-interleaved->fsdp2 moe-tp-ep->moe-fsdp-tp-ep"


def ranks_of(name: str) -> int:
    dims, _ = MESHES[name]
    return dims.num_ranks


def job_on(name: str, seed: int = 0) -> Job:
    dims, options = MESHES[name]
    return Job(dims, seed, 4 if dims.pp > 1 else 1, **{"args": DEEP} | options)


def held(job: Job) -> Tensors:
    """What this rank holds of model and optimizer, whole: of a pipeline its own stages."""
    return {
        name: whole(tensor).clone()
        for name, tensor in job.tensors.state_dict().items()
        if not name.startswith("rng.")
    }


def _train(name: str, folder: str) -> tuple[Tensors, Tensors]:
    """Save after two steps: the state then, and after one more."""
    job = job_on(name)
    for step in (1, 2):
        job.take_step(step)
    job.save(folder)
    saved = held(job)
    job.take_step(3)
    return saved, held(job)


def _resume(name: str, folder: str) -> tuple[Tensors, Tensors]:
    """The state that is found, and after a step."""
    job = job_on(name, seed=1)
    job.take_step(1)  # so that there is state of an optimizer to be replaced
    # another rank's generators are not this one's, as the manager knows
    state = {k: v for k, v in job.tensors.state_dict().items() if not k.startswith("rng.")}
    CheckpointWeights(NamedPath("test", Path(folder)), str).load(state)
    job.tensors.load_state_dict(state)
    for stage in job.model.stages:
        stage.init_buffers()
    found = held(job)
    job.take_step(3)
    dist.barrier()
    return found, held(job)


def merge(results: list[tuple[Tensors, Tensors]], which: int) -> Tensors:
    """Of all ranks, which agree where they hold the same."""
    state: Tensors = {}
    for result in results:
        for name, tensor in result[which].items():
            assert torch.equal(state.setdefault(name, tensor), tensor), name
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, tuple[Path, Tensors, Tensors]]:
    """By mesh, filled as tests need it."""
    return {"": (tmp_path_factory.mktemp("saved"), {}, {})}


@pytest.mark.parametrize(("source", "target"), slow_but(EVERYDAY, PAIRS))
def test_a_checkpoint_goes_on_on_another_mesh(source, target, on_ranks, saved) -> None:
    folder = saved[""][0] / source
    if source not in saved:
        results = on_ranks(ranks_of(source), _train, source, str(folder))
        saved[source] = folder, merge(results, 0), merge(results, 1)
    _, at_save, a_step_later = saved[source]
    results = on_ranks(ranks_of(target), _resume, target, str(folder))
    found = merge(results, 0)
    assert_equal(found, at_save)
    assert any(name.endswith("feed_forward.bias") for name in found) == ("moe" in source)
    for name, tensor in merge(results, 1).items():
        args = MIXED if "moe" in source else DEEP
        assert_updated_alike(tensor, a_step_later[name], at_save[name], name, args=args)
