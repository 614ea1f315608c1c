"""Packed sequences on several ranks against each of their documents alone on one."""

import dataclasses

import pytest

from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.distributed.test_compile import INDUCTOR, Graphs
from tests.helpers.job import DEEP, SCHEDULES, Job, mesh
from tests.helpers.needs import needs_compiler
from tests.helpers.packed import packed, reference
from tests.helpers.rounding import gradient_bound
from tests.helpers.slow import slow_but
from tests.helpers.tiny import TINY

ALONE = mesh()
FSDP = dataclasses.replace(ALONE, dp_shard=2)
CASES = {
    "2d": (dataclasses.replace(FSDP, tp=2), {}),
    "cp4": (dataclasses.replace(ALONE, cp=4), {}),
    "cp-tp": (dataclasses.replace(ALONE, cp=2, tp=2), {}),
    "pp-zbv": (dataclasses.replace(ALONE, pp=2), SCHEDULES["ZBVZeroBubble"]),
    "pp-cp": (dataclasses.replace(ALONE, pp=2, cp=2), SCHEDULES["1F1B"]),
    "op": (FSDP, {"ac_mode": "selective", "selective_ac_option": "op"}),
    "cp-full": (dataclasses.replace(ALONE, cp=2), {"ac_mode": "full"}),
}
COMPILED = {
    "fsdp-op": (FSDP, {"ac_mode": "selective"}),
    "tp": (dataclasses.replace(ALONE, tp=2), {}),
    "cp": (dataclasses.replace(ALONE, cp=2), {}),
    "pp": (dataclasses.replace(ALONE, pp=2), SCHEDULES["1F1B"]),
}


def packed_job(dims: ParallelDims, options: dict) -> Job:
    args = DEEP if dims.pp > 1 else TINY
    return Job(dims, 0, 4 if dims.pp > 1 else 2, args=args, **options)


def take_packed_step(job: Job, step: int) -> float:
    return job.take_step(step, job.part(packed(step))).loss.item()


def _compare(job: Job, args: LlamaArgs) -> None:
    gradients = job.whole_gradients()
    loss = take_packed_step(job, 1)
    want_loss, want_gradients = reference(args)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, gradient in gradients.items():
        want = want_gradients[name]
        error = ((gradient - want).norm() / want.norm()).item()
        assert error <= gradient_bound(args), f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("dims", "options"),
    [*slow_but("2d pp-zbv", CASES), pytest.param(FSDP, INDUCTOR, marks=needs_compiler)],
)
@pytest.mark.ranks("dims")
def test_packed_documents_learn_as_they_do_alone(dims, options) -> None:
    _compare(packed_job(dims, options), DEEP if dims.pp > 1 else TINY)


@pytest.mark.parametrize(("dims", "options"), slow_but("fsdp-op", COMPILED))
@pytest.mark.ranks("dims")
def test_other_documents_are_not_compiled_anew(dims, options) -> None:
    graphs = Graphs()
    job = packed_job(dims, {"compile_backend": "aot_eager", **options})
    _compare(job, DEEP if dims.pp > 1 else TINY)
    first = graphs.new()
    for step in (2, 3):
        take_packed_step(job, step)
    num_of_loss = 2 * any(stage.output is not None for stage in job.model.stages)
    assert (first - num_of_loss, graphs.new()) == (1, 0)
