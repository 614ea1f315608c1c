"""Packed sequences on several ranks against each of their documents alone on one."""

import pytest

from tests.distributed.test_compile import AOT, INDUCTOR, Graphs
from tests.helpers.job import DEEP, SCHEDULES, Job, mesh
from tests.helpers.needs import needs_compiler
from tests.helpers.packed import packed, reference
from tests.helpers.rounding import gradient_bound
from tests.helpers.slow import slow_but
from tests.helpers.tiny import TINY

CASES = {
    "fsdp-op": (mesh(dp_shard=2), AOT | {"ac_mode": "selective"}),
    "tp": (mesh(tp=2), AOT),
    "cp": (mesh(cp=2), AOT),
    "pp": (mesh(pp=2), AOT | SCHEDULES["1F1B"]),
    "cp4": (mesh(cp=4), {}),
    "pp-cp": (mesh(pp=2, cp=2), SCHEDULES["1F1B"]),
    "pp-zbv": (mesh(pp=2), SCHEDULES["ZBVZeroBubble"]),  # which compiled blocks cannot
}
"""Others that are eager: tests/distributed/test_families.py."""


BY_INDUCTOR = pytest.param(mesh(dp_shard=2), INDUCTOR, marks=[needs_compiler, pytest.mark.slow])


@pytest.mark.parametrize(("dims", "options"), [*slow_but("fsdp-op pp-zbv", CASES), BY_INDUCTOR])
@pytest.mark.ranks("dims")
def test_packed_documents_learn_as_they_do_alone_and_others_are_not_compiled_anew(
    dims, options
) -> None:
    graphs = Graphs()
    args = DEEP if dims.pp > 1 else TINY
    job = Job(dims, 0, 4 if dims.pp > 1 else 2, args=args, **options)
    gradients = job.whole_gradients()
    loss = job.take_step(1, job.part(packed(1))).loss.item()
    want_loss, want_gradients = reference(args)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, gradient in gradients.items():
        want = want_gradients[name]
        error = ((gradient - want).norm() / want.norm()).item()
        assert error <= gradient_bound(args), f"{name}: {error:.1e}"
    first = graphs.new()
    for step in (2, 3):
        job.take_step(step, job.part(packed(step)))
    is_compiled = "compile_backend" in options
    num_of_loss = 2 * any(stage.output is not None for stage in job.model.stages)
    assert (first, graphs.new()) == ((1 + num_of_loss) * is_compiled, 0)
