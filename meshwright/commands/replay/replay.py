"""Takes steps of a run again, and compares each with the record. Runs on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from meshwright.commands.replay.compared import ComparedStep, ComparedSteps
from meshwright.commands.replay.job import close_job, open_job, other_microbatch, take_steps
from meshwright.commands.replay.samples import SampleTable, measure_samples
from meshwright.commands.replay.scan import Scan, scan_documents
from meshwright.config.job_config import JobConfig
from meshwright.metrics.report.run import Row
from meshwright.models.loss import Batch
from meshwright.train.running_job import RunningJob


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
class Replayed(ComparedSteps):
    """The steps from the checkpoint to the one that was asked for, and the samples of that."""

    table: SampleTable


def replay_steps(request: Request) -> Replayed:
    """Take the steps; measure the samples of the last. Collective."""
    tables = list[SampleTable]()

    def look(job: RunningJob, step: int, batches: list[Batch]) -> None:
        if step == request.step:
            tables.append(measure_samples(job, step, batches, request.num_samples))

    job = _open(request)
    begin, meshes = job.resolved.resume_step, job.meshes
    dtype, size = job.resolved.config.training.mixed_precision_param, other_microbatch(job)
    with _bar("replay", request.step - begin) as bar:
        taken = take_steps(job, request.step, look, note=lambda _: bar.update())
    close_job(job)
    del job
    compared = [ComparedStep(row, request.records.get(row["step"])) for row in taken]
    if size and not all(one.is_equal for one in compared):
        job = open_job(request.config, request.ranks, meshes, local_batch_size=size)
        with _bar("rounding twin", request.step - begin) as bar:
            twins = take_steps(job, request.step, note=lambda _: bar.update())
        close_job(job)
        compared = [replace(one, twin=twin) for one, twin in zip(compared, twins, strict=True)]
    return Replayed(dtype, compared, tables[0])


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
