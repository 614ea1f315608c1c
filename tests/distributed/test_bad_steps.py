"""A step that is skipped might as well not have been, on any mesh; and what is said of it."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.config.job_config import JobConfig
from meshwright.config.training import BadSteps
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.system.errors import TrainingError
from meshwright.train.bad_step_report import FILE, BadStepReporter
from meshwright.train.bad_steps import BadStepDetector
from tests.distributed.test_manager import logged
from tests.helpers.faults import loss_times
from tests.helpers.job import DEEP, SCHEDULES, Job, frozen, global_batch, mesh
from tests.helpers.slow import slow_but
from tests.helpers.tiny import CPU, TINY

STEPS = 7
FACTORS = {4: float("nan"), 6: 1000.0}
"""By step that is bad: what the loss is multiplied by, on one rank or on all."""


def lr_at(step: int) -> float:
    """It moves on with every step, skipped or not."""
    return 1 / step


class Run(Job):
    """On a mesh, step by step."""

    def __init__(
        self, dims: ParallelDims, num_microbatches: int, options: dict, args: LlamaArgs
    ) -> None:
        config = BadSteps(policy="skip", budget=2, spike_std=50, spike_window=3)
        detector = BadStepDetector(CPU, config)
        super().__init__(dims, 0, num_microbatches, detector=detector, args=args, **options)
        self.trainer.lr_at = lr_at

    def run_step(self, step: int, has_labels: bool = True) -> None:
        tokens, labels = global_batch(step)
        batch = Batch(tokens, labels if has_labels else torch.full_like(labels, IGNORE))
        self.take_step(step, self.part(batch), max_norm=0.5)

    def state(self) -> list[torch.Tensor]:
        """Copies of what this rank holds of weights and optimizer state, its step counts too."""
        tensors = [p.detach() for p in self.model.parameters()]
        tensors += [t for slots in self.optimizer.state.values() for t in slots.values()]
        return [getattr(tensor, "_local_tensor", tensor).clone() for tensor in tensors]


def _skips(
    dims: ParallelDims, num_microbatches: int, options: dict, args: LlamaArgs
) -> tuple[list[tuple[int, bool]], dict]:
    run = Run(dims, num_microbatches, options, args)
    # what is not finite comes from the last rank alone (in a pipeline all, for one has the loss)
    is_faulty = dims.pp > 1 or dist.get_rank() == dist.get_world_size() - 1
    for step in range(1, STEPS + 1):
        before = run.state()
        factor = FACTORS.get(step, 1.0) if is_faulty or step == 6 else 1.0
        with loss_times(factor):
            run.run_step(step)
        pairs = list(zip(before, run.state(), strict=step > 1))
        if step in FACTORS:
            assert all(torch.equal(*pair) for pair in pairs), step
        else:
            assert not any(torch.equal(*pair) for pair in pairs[-3:]), step

    never = Run(dims, num_microbatches, options, args)
    for step in range(1, STEPS + 1):
        if step not in FACTORS:
            never.run_step(step)
    assert all(torch.equal(*pair) for pair in zip(run.state(), never.state(), strict=True))

    bad_steps = run.detector.bad_steps()
    statistics = run.detector.statistics()
    run.run_step(STEPS + 1, has_labels=False)
    assert [bad.num_labels > 0 for bad in run.detector.bad_steps()] == [True, True, False]
    return [(bad.step, bad.is_finite_here) for bad in bad_steps], statistics


MESHES = {
    "accumulate": (mesh(dp_shard=2), 2, {}, TINY),
    "frozen": (mesh(dp_shard=2), 1, frozen("*.wq.*"), TINY),
    "offload": (mesh(dp_shard=2), 1, {"enable_cpu_offload": True}, TINY),
    "compile": (mesh(dp_shard=2), 1, {"compile_backend": "eager"}, TINY),
    "replicate": (mesh(dp_replicate=2), 1, {}, TINY),
    "tp": (mesh(tp=2), 1, {}, TINY),
    "cp": (mesh(cp=2), 1, {}, TINY),
    "pp": (mesh(pp=2, dp_shard=2), 2, SCHEDULES["1F1B"], DEEP),
    "pp-zbv": (mesh(pp=2), 4, SCHEDULES["ZBVZeroBubble"], DEEP),
}


@pytest.mark.parametrize(
    ("dims", "microbatches", "options", "args"), slow_but("accumulate pp-zbv", MESHES)
)
def test_a_skipped_step_leaves_all_as_it_was(on_ranks, dims, microbatches, options, args) -> None:
    ranks = dims.dp * dims.cp * dims.tp * dims.pp
    found, statistics = zip(
        *on_ranks(ranks, _skips, dims, microbatches, options, args), strict=True
    )
    assert all(theirs == statistics[0] for theirs in statistics), "ranks judge by other figures"
    for rank, bad in enumerate(found):
        assert [step for step, _ in bad] == [4, 6], rank
        assert bad[1] == (6, True), rank
    if dims.tp == dims.pp == 1:
        assert [bad[0] for bad in found] == [(4, rank < ranks - 1) for rank in range(ranks)]


@pytest.mark.ranks(2)
def test_what_was_skipped_is_said_once_with_its_samples(tmp_path: Path) -> None:
    """A mixture of two sources in global batches of 8; skipped on both ranks, found on one."""
    rank = dist.get_rank()
    bad_steps = BadSteps(policy="skip", budget=3, spike_std=6, spike_window=2)
    config = JobConfig(bad_steps=bad_steps, job={"dump_folder": str(tmp_path)})
    if rank == 0:
        (tmp_path / FILE).write_text('{"step": 40}\n{"step": 42}\n')  # by a run that was killed
    saved = None

    def start(step: int, counts: tuple[int, ...]) -> BadStepReporter:
        place = {"sources": ["books", "code"], "step": step, "samples_read": counts}
        reporter = BadStepReporter(config, CPU, **place)
        if saved is not None:
            reporter.load_state_dict(saved)
        return reporter

    def step(
        log: BadStepReporter, number: int, loss: float, counts: tuple[int, int], labels: int = 8
    ) -> None:
        is_finite, num_labels = torch.tensor(rank == 0 or loss == loss), torch.tensor(labels)
        log.detector.judge(number, torch.tensor(loss), torch.tensor(1.0), is_finite, num_labels)
        log.after_step(number, counts)

    log = start(40, (300, 20))
    with logged() as messages:
        log.check()
        step(log, 41, 4.0, (305, 23))
        step(log, 42, 4.5, (310, 26))
        step(log, 43, float("nan"), (315, 29))
        step(log, 44, 4.2, (323, 29))
        assert messages == []
        log.check()
        log.check()
        step(log, 45, 99.0, (328, 32))
        assert log.figures() == {"optim/skipped_steps": 1}
        log.check()
    assert log.figures() == {"optim/skipped_steps": 2}
    assert len(messages) == (2 if rank == 0 else 0)
    saved = json.loads(json.dumps(log.state_dict()))
    assert saved["skipped"] == [43, 45]
    log.__exit__(None, None, None)
    log = start(45, (328, 32))
    step(log, 46, 4.1, (333, 35))
    step(log, 47, float("nan"), (338, 38), labels=0)
    step(log, 48, 77.0, (346, 38))
    step(log, 49, 4.1, (351, 41))
    with logged() as more, pytest.raises(TrainingError) as error:
        log.check()
    said = (
        "step 43 .*(1 of at most 3): non-finite loss on rank 1; .*310 to 314 of books, 26 to 28 of",
        "step 45 .*(2 of at most 3): loss 99 .*323 to 327 of books, 29 to 31 of code",
        "step 47 .*(3 of at most 3): none of its labels .*333 to 337 of books, 35 to 37 of code",
    )
    for pattern, message in zip(said if rank == 0 else (), messages + more, strict=True):
        assert re.match(pattern.replace("(", r"\(").replace(")", r"\)"), message)
    says = "loss 77 .* at step 48; .*338 to 345 of books; .*budget = 3 .*steps 43, 45, 47"
    assert re.match(says, str(error.value))
    log.__exit__(None, None, None)
    dist.barrier()
    records = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == [40, 43, 45, 47]
    found = [records[1][key] for key in ("ranks", "loss", "loss_mean", "loss_deviation")]
    assert found == [[1], None, 4.25, 0.25]
    assert records[1]["samples"] == {"books": [310, 314], "code": [26, 28]}
