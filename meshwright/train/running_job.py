"""One rank's job while it runs: its parts, and the phase that it is in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from meshwright.checkpoint.manager import CheckpointManager
from meshwright.datasets.loader import Loader
from meshwright.datasets.stream import Cursor, OpenSource
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.observers import Observer
from meshwright.metrics.reporter import Pause, Reporter
from meshwright.parallelisms.meshes import Meshes
from meshwright.system.log import busy
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.best_validation import BestValidation
from meshwright.train.resolve import ResolvedJob
from meshwright.train.step_record import StepRecord
from meshwright.train.trainer import Trainer
from meshwright.train.validation import Validation

PAUSES: dict[str, Pause | None] = {
    "validation": "validation",
    "save": "checkpoint",
    "preparing saves": None,
}
"""Phases that rates leave out, and the metric that the time of each adds to, if any."""


@dataclass(frozen=True)
class RunningJob:
    """The parts of one rank's job, ready for the step after `resolved.resume_step`."""

    resolved: ResolvedJob
    device: torch.device
    attention: Sequence[str]
    """torch's kernels of attention in the order in which they are to be tried; empty: its own."""
    sources: Sequence[OpenSource]
    validation_sources: Sequence[OpenSource]
    begin: Cursor
    """Where the samples of its first step start."""
    checkpoints: CheckpointManager
    heartbeat: Heartbeat
    meshes: Meshes
    trainer: Trainer
    loader: Loader
    reporter: Reporter
    validate: Validation | None
    detector: BadStepDetector
    best_validation: BestValidation
    step_record: StepRecord
    observers: Mapping[str, Observer]
    """Everything optional, by name, such as the report of skipped steps."""
    since: float
    """`time.perf_counter()` when its set-up started."""

    @contextmanager
    def phase(self, name: str, step: int | None = None, *, is_long: bool = False) -> Iterator[None]:
        """Tell the launcher, the log and the clock which part of the job this rank does inside.

        Args:
            step: the one under way; None: as before.
            is_long: the log says every ten seconds that the phase isn't over, as it does of a
                phase in `PAUSES`.
        """
        self.heartbeat.update(name, step)
        with ExitStack() as stack:
            if name in PAUSES:
                stack.enter_context(self.reporter.paused(PAUSES[name]))
            if is_long or name in PAUSES:
                stack.enter_context(busy(name))
            yield
