"""Takes steps of a run again, and compares each with the record. Runs on every rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from tqdm import tqdm

from meshwright.commands.replay.job import StepFigures, close_job, open_job, take_steps
from meshwright.commands.replay.recorded import relative
from meshwright.commands.replay.samples import SampleTable, measure_samples
from meshwright.commands.replay.scan import Scan, scan_documents
from meshwright.config.job_config import JobConfig
from meshwright.metrics.report.run import Row
from meshwright.models.loss import Batch
from meshwright.train.running_job import RunningJob

LEAST_ROUNDING = 1e-7
"""Relative differences below it are taken for rounding: an ulp of float32 is 6e-8 to 1.2e-7."""

TIMES_ROUNDING = 10.0
"""How many times the difference of the twin a metric may differ from the record."""

WITHOUT_TWIN = {"float32": 1e-5, "bfloat16": 5e-2}
"""Relative differences by rounding where nothing measures them, by the type of activations: of 10
times the largest that were measured between meshes."""

HORIZON = 1e-3
"""Relative difference of the twin's loss from which steps are no longer comparable: where rounding
has grown so much, it doubles every few steps."""


@dataclass(frozen=True)
class Request:
    """What the ranks are to do."""

    config: JobConfig
    ranks: int
    step: int
    """To take, after all since the checkpoint."""
    records: Mapping[int, Row]
    """Of the run, by step."""
    threads: int
    """Of each rank on a CPU, as in the run: they decide how sums are rounded. 0: not known."""
    num_samples: int
    """Samples to tell of, or documents at each end."""


@dataclass(frozen=True)
class ComparedStep:
    """A step, next to its record and its twin: the same step with other microbatches."""

    taken: StepFigures
    recorded: StepFigures | None
    """None: the run hasn't logged the step."""
    twin: StepFigures | None = None
    """None: there is none, as the bits are equal, or a step is a single sequence."""

    @property
    def is_equal(self) -> bool:
        """Whether every metric of the record is equal to the bit."""
        return not any(self.differences)

    @property
    def differences(self) -> list[float]:
        """Relative differences from the record: of loss, norm and the recorded groups' norms."""
        return [] if self.recorded is None else relative(self.taken.all, self.recorded.all)

    @property
    def rounding(self) -> list[float]:
        """Relative differences of the twin, of the same metrics."""
        return [] if self.twin is None else relative(self.twin.all, self.taken.all)


def bounds_of(rounding: Sequence[Sequence[float]]) -> list[float]:
    """Return how far each metric may be off, by the twin's differences of every step; none, if
    there is no twin."""
    columns = zip(*rounding, strict=True)
    return [TIMES_ROUNDING * max(*column, LEAST_ROUNDING) for column in columns]


@dataclass(frozen=True)
class Replayed:
    """The steps from the checkpoint to the one that was asked for."""

    mesh: str
    dtype: str
    """That forward and backward compute in."""
    steps: Sequence[ComparedStep]
    table: SampleTable

    @cached_property
    def bounds(self) -> list[float]:
        """How far each metric may be off by rounding: loss, norm, norms of groups."""
        without = [WITHOUT_TWIN[self.dtype]] * len(self.steps[0].taken.all)
        return bounds_of([step.rounding for step in self.steps]) or without

    def is_other(self, step: ComparedStep) -> bool:
        """Return whether a step differs from its record by more than rounding."""
        # the record may lack groups
        return any(d > b for d, b in zip(step.differences, self.bounds, strict=False))

    @property
    def first_other(self) -> ComparedStep | None:
        """The first step that differs from its record by more than rounding."""
        return next(filter(self.is_other, self.steps), None)

    @property
    def beyond_horizon(self) -> ComparedStep | None:
        """The first step up to which rounding by itself has grown too much to compare any."""
        return next((s for s in self.steps if s.rounding and s.rounding[0] > HORIZON), None)


def replay_steps(request: Request) -> Replayed:
    """Take the steps; measure the samples of the last. Collective."""
    tables = list[SampleTable]()

    def look(job: RunningJob, step: int, batches: list[Batch]) -> None:
        if step == request.step:
            tables.append(measure_samples(job, step, batches, request.num_samples))

    job = _open(request)
    begin, mesh, meshes = job.resolved.resume_step, str(job.resolved.dims) or "no mesh", job.meshes
    dtype, size = job.resolved.config.training.mixed_precision_param, other_microbatch(job)
    with _bar("replay", request.step - begin) as bar:
        taken = take_steps(job, request.step, look, note=lambda _: bar.update())
    close_job(job)
    del job
    compared = [ComparedStep(one, _recorded(request.records.get(one.step))) for one in taken]
    if size and not all(one.is_equal for one in compared):
        job = open_job(request.config, request.ranks, meshes, local_batch_size=size)
        with _bar("rounding twin", request.step - begin) as bar:
            twins = take_steps(job, request.step, note=lambda _: bar.update())
        close_job(job)
        compared = [replace(one, twin=twin) for one, twin in zip(compared, twins, strict=True)]
    return Replayed(mesh, dtype, compared, tables[0])


def scan(request: Request) -> Scan:
    """Measure all documents with the checkpoint. Collective."""
    job = _open(request)
    with _bar("scan", None) as bar:
        found = scan_documents(job, request.num_samples, lambda done: bar.update(done - bar.n))
    close_job(job)
    return found


def _open(request: Request) -> RunningJob:
    if request.threads:
        torch.set_num_threads(request.threads)
    return open_job(request.config, request.ranks)


_bar = partial(tqdm, leave=False, disable=None)


def _recorded(row: Row | None) -> StepFigures | None:
    if row is None:
        return None
    # a record has no value that isn't finite
    loss, norm = (math.nan if row.get(k) is None else row[k] for k in ("loss", "grad_norm"))
    return StepFigures(row["step"], loss, norm, row.get("norms", []))


def other_microbatch(job: RunningJob) -> int:
    """Return a different number of sequences, with which sums are rounded otherwise; 0: there is
    none."""
    training = job.resolved.config.training
    size, of_rank = training.local_batch_size, training.global_batch_size // job.meshes.dp.size()
    if size > 1:
        return size // 2 if size % 2 == 0 else 1
    return 2 if of_rank % 2 == 0 else 0
