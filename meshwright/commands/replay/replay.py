"""Takes steps of a run again, and compares each with the record. Runs on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from meshwright.commands.replay.compared import ComparedStep, ComparedSteps
from meshwright.commands.replay.job import take_steps, with_twin
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
    tables, records = list[SampleTable](), request.records

    def look(job: RunningJob, step: int, batches: list[Batch]) -> None:
        if step == request.step and not tables:
            tables.append(measure_samples(job, step, batches, request.num_samples))

    def take(job: RunningJob) -> list[Row]:
        name = "rounding twin" if tables else "replay"
        with _bar(name, request.step - job.resolved.resume_step) as bar:
            return take_steps(job, request.step, look, note=lambda _: bar.update())

    def is_other(rows: list[Row]) -> bool:
        return not all(ComparedStep(row, records.get(row["step"])).is_equal for row in rows)

    rows = with_twin(request.config, request.ranks, take, is_other, request.threads)
    steps = [
        ComparedStep(row, records.get(row["step"]), *twin) for row, *twin in zip(*rows, strict=True)
    ]
    return Replayed(request.config.training.mixed_precision_param, steps, tables[0])


def scan(request: Request) -> Scan:
    """Measure all documents with the checkpoint. Collective."""

    def take(job: RunningJob) -> Scan:
        with _bar("scan", None) as bar:
            return scan_documents(job, request.num_samples, lambda done: bar.update(done - bar.n))

    (found,) = with_twin(request.config, request.ranks, take, lambda _: False, request.threads)
    return found


_bar = partial(tqdm, leave=False, disable=None)
