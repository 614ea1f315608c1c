"""The job that takes steps of a run again, on one rank."""

import gc
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from typing import Any, TypeVar

import torch

from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.report.run import Row
from meshwright.metrics.reporter import SinkWriter
from meshwright.models.loss import Batch
from meshwright.parallelisms.meshes import Meshes
from meshwright.system.hardware import ordered_attention
from meshwright.system.processes import Launch
from meshwright.train.facts import look
from meshwright.train.resolve import ResolvedJob, resolve
from meshwright.train.running_job import RunningJob
from meshwright.train.set_up import init_ranks, set_up
from meshwright.train.trainer import StepResult

Result = TypeVar("Result")


def open_job(
    config: JobConfig, ranks: int, meshes: Meshes | None = None, local_batch_size: int = 0
) -> RunningJob:
    """Build the job and load its checkpoint. Collective.

    Args:
        meshes: of the job before in this process, if there was one.
        local_batch_size: in the place of the config's, in every stage; 0: as it is.

    Raises:
        ConfigError: if the config can't run here, or the checkpoint or the data isn't the run's.
    """
    is_gpu = torch.cuda.is_available()
    facts = look(config, ranks, expects_gpus=is_gpu, device_type="cuda" if is_gpu else "cpu")
    resolved = resolve(config, facts)
    resolved, device, checkpoints = init_ranks(_reading(resolved, local_batch_size), Launch())
    with redirect_stdout(None):  # no bar
        job = set_up(
            resolved,
            device,
            checkpoints,
            Heartbeat(),
            Launch(),
            [],
            meshes,
            make_sinks=lambda *_: SinkWriter([]),
        )
    gc.enable()  # as other jobs follow in this process
    assert job is not None, "its steps aren't done"
    return job


def _reading(resolved: ResolvedJob, local_batch_size: int) -> ResolvedJob:
    """Return the job and its later stages, none of which saves or sets aside checkpoints. Their
    rules ask that jobs with stages save, and were judged before."""
    config = changed(resolved.config, {"checkpoint": {"load_only": True}})
    if local_batch_size:
        config = changed(config, {"training": {"local_batch_size": local_batch_size}})
    later = None
    if resolved.next_stage is not None:
        later = _reading(resolved.next_stage, local_batch_size)
    return replace(resolved, config=config, next_stage=later)


def with_twin(
    config: JobConfig,
    ranks: int,
    take: Callable[[RunningJob], Result],
    wants_twin: Callable[[Result], bool],
    threads: int = 0,
) -> list[Result]:
    """Return what `take` makes of a job, and then, if that wants it, of the rounding twin: the same
    job with other microbatches, unless there are none. Collective.

    Args:
        threads: of each rank on a CPU, which decide how sums are rounded; 0: torch's choice.
    """
    if threads:
        torch.set_num_threads(threads)
    job = open_job(config, ranks)
    size, meshes = other_microbatch(job), job.meshes
    results = [take(job)]
    _close(job)
    del job  # before there are two
    if size and wants_twin(results[0]):
        twin = open_job(config, ranks, meshes, local_batch_size=size)
        results.append(take(twin))
        _close(twin)
    return results


def _close(job: RunningJob) -> None:
    """Stop reading ahead, and free memory of jobs that nothing refers to any more."""
    job.loader.close()
    job.observers["step_record"].__exit__(None, None, None)
    gc.collect()
    torch.cuda.empty_cache()


Look = Callable[[RunningJob, int, list[Batch]], None]
"""Looks at the job, the number of its next step, and the batches of that."""


def take_steps(
    job: RunningJob, last: int, look: Look | None = None, *, note: Callable[[int], None]
) -> list[Row]:
    """Take the steps up to `last` as the run took them. Collective.

    Args:
        look: is called before each step.
        note: gets the number of each step that is taken, after it.
    """
    rows = list[Row]()
    with ExitStack() as stack:
        stack.enter_context(ordered_attention(job.attention))
        for step in range(job.resolved.resume_step + 1, last + 1):
            data = next(job.loader)
            batches = [batch.to(job.device) for batch in data.batches]
            if look is not None:
                look(job, step, batches)
            rows.append(row_of(step, job.trainer.step(step, batches, job.detector)))
            note(step)
    return rows


def row_of(step: int, result: StepResult) -> dict[str, Any]:
    """Return the results of a step as a line of the record has them, without sums of bits."""
    norms = [] if result.group_norms is None else result.group_norms.tolist()
    loss, grad_norm = result.loss.item(), result.grad_norm.item()
    return {"step": step, "loss": loss, "grad_norm": grad_norm, "norms": norms}


def other_microbatch(job: RunningJob) -> int:
    """Return a different number of sequences, with which sums are rounded otherwise; 0: there is
    none."""
    training = job.resolved.config.training
    size, of_rank = training.local_batch_size, training.global_batch_size // job.meshes.dp.size()
    if size > 1:
        return size // 2 if size % 2 == 0 else 1
    return 2 if of_rank % 2 == 0 else 0
