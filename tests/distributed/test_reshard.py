"""Every pipeline schedule with every policy by which FSDP2 frees gathered parameters."""

import dataclasses
import itertools

import pytest

from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.rules.stages import SCHEDULES
from tests.distributed.test_step import steps_on_mesh
from tests.helpers.job import DEEP
from tests.helpers.job import SCHEDULES as OPTIONS

DIMS = ParallelDims(dp_replicate=1, dp_shard=2, pp=2)
LAYERS_8 = dataclasses.replace(DEEP, n_layers=8)
CASES = {
    **{
        f"{name}, {policy}": (OPTIONS[name] | {"reshard_after_forward": policy}, DEEP)
        for name, policy in itertools.product(SCHEDULES, ("always", "never"))
        # refused by check_schedule: torch loses gradients
        if not (SCHEDULES[name].splits_backward and policy == "always")
    },
    # with more than three stages on a rank, torch itself frees a stage between its two passes
    **{
        f"{name}, 4 stages a rank": ({"schedule": name, "stages_per_rank": 4}, LAYERS_8)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    },
    "ZBVZeroBubble, offloaded": (OPTIONS["ZBVZeroBubble"] | {"enable_cpu_offload": True}, DEEP),
}


def _errors() -> dict[str, str]:
    found = {}
    for case, (options, args) in CASES.items():
        try:
            steps_on_mesh(DIMS, 4, options, args)
        except AssertionError as error:
            found[case] = str(error)
    return found


@pytest.mark.slow
def test_every_schedule_and_policy_equals_plain_pytorch(on_ranks) -> None:
    assert on_ranks(4, _errors) == [{}] * 4
