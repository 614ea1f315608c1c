"""The job in three parts: set up (`set_up.py`), loop, finish."""

import gc
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.agreement import check_agreement
from meshwright.announce import announce_end, note_end, note_failure
from meshwright.checkpoint.manager import CheckpointManager, HasState
from meshwright.config.conditions import compiles, is_compiled, saves
from meshwright.datasets.loader import StepData, num_bad_records, whole_cursor
from meshwright.datasets.opening import open_training_data, open_validation_data
from meshwright.due import Due, due_after
from meshwright.early_end import check_has_data, check_resumes, raise_data_error
from meshwright.errors import StopRequested
from meshwright.final_export import export_last, is_exported, prepare_export
from meshwright.hardware import ordered_attention
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.process import Requests
from meshwright.launch.stop import StopCoordinator, remove_stop_file
from meshwright.log import busy, logger
from meshwright.metrics.planned import planned_memory
from meshwright.metrics.record import Sink
from meshwright.parallelisms.process_group import (
    barrier,
    last_collectives,
    set_timeout,
)
from meshwright.preflight import Plan
from meshwright.profiling import Profiler
from meshwright.saved_job import manifest_of, too_many_bad_records
from meshwright.set_up import Job, order_attention, set_up, start
from meshwright.step import StepResult


@dataclass(frozen=True)
class Taken:
    """A step that has been taken."""

    step: int
    data: StepData
    result: StepResult


def run(
    plan: Plan,
    extra_sinks: Sequence[Sink] = (),
    heart: Heartbeat | None = None,
    requests: Requests | None = None,
) -> bool:
    """Train from the start or the last checkpoint to the last step, or until asked to stop.

    Args:
        extra_sinks: get every record after the sinks that the config asks for.
        heart: tells the launcher where this rank is.
        requests: to stop; None: only signals from now on.

    Returns:
        Whether the last step is done, and exported if that is asked for.

    Raises:
        StopRequested: if asked before the first step.
        TrainingError: if there were more bad steps than allowed; or if it was asked to stop, and
            the same command would not resume from there.
    """
    if requests is None:
        with Requests() as requests:
            return run(plan, extra_sinks, heart, requests)
    heart = heart or Heartbeat()
    heart.beat("meeting the other ranks, opening the data")
    heart.limit(plan.config.comm.init_timeout_seconds, "comm.init_timeout_seconds")
    heart.answer(last_collectives)
    with heart.guard(), busy("meeting the other ranks, opening the data"):
        device = start(plan)
        attention = ordered_attention(order_attention(plan, device))
        sources, held_out = open_training_data(plan.config), open_validation_data(plan.config)
        check_agreement(plan, [*sources, *held_out], device.type)
        checkpoints = CheckpointManager(plan.checkpoint_folder, plan.config.checkpoint)
        checkpoints.claim()
    try:
        if dist.get_rank() == 0:
            remove_stop_file(Path(plan.config.job.dump_folder))
        heart.beat("set-up")
        with heart.guard(), busy("setting up"):
            prepare_export(plan.config)
            job = set_up(plan, device, checkpoints, sources, held_out, extra_sinks, heart)
        if job is None:
            heart.limit(0, "")
            rank = dist.get_rank()
            dist.destroy_process_group()
            return rank > 0 or _export(plan, requests)
        config, dump_folder = job.plan.config, Path(job.plan.config.job.dump_folder)
        rank, first = dist.get_rank(), job.resumed_step
        with (
            requests.held(),
            note_failure(job.plan, lambda: job.reporter.step),
            closing(job.reporter),
        ):
            with (
                Profiler(config.profiling, dump_folder, rank, first) as profiler,
                StopCoordinator(dump_folder, config.job.max_run_seconds, requests) as stop,
                checkpoints,
                heart.guard(),
                attention,
            ):
                taken, is_done = _loop(job, stop, profiler, requests)
                if taken is not None and saves(config.checkpoint):
                    _save(job, taken, is_last=True, is_done=is_done)
            step = taken.step if taken is not None else first
            heart.beat("end", step)
            is_done = _finish(job, stop, step, is_done)
        heart.limit(0, "")  # nobody waits for the export
        return is_done and (rank > 0 or _export(job.plan, requests))
    finally:
        checkpoints.release()


def _export(plan: Plan, requests: Requests) -> bool:
    """Export the last checkpoint if the config asks for it. False: a request to stop ends it."""
    if not is_exported(plan.config):
        return True
    try:
        requests.check()  # it may have come during the last save
        export_last(plan)
    except StopRequested as asked:
        logger.info("%s: the export is left out; start it again to export what is saved", asked)
        return False
    return True


def _loop(
    job: Job, stop: StopCoordinator, profiler: Profiler, requests: Requests
) -> tuple[Taken | None, bool]:
    """Take steps until none is left or the ranks agree to stop.

    Returns:
        The last step of this process, and whether none comes after it: all are taken, or the data
        has ended.
    """
    config, step, taken, is_last = job.plan.config, job.resumed_step, None, False
    data_time_s = _look_ahead(job, stop, step)
    is_over = stop.is_over(step)
    if is_compiled(config.compile) and not is_over:
        logger.info("the first step compiles: minutes, or seconds if a job like it has run here")
    while not is_over:
        data = next(job.loader, None)
        if data is None:
            check_has_data(step + 1)
            return taken, True
        step += 1
        job.heart.beat("copying its batches to the device", step)
        batches = [batch.to(job.device, non_blocking=True) for batch in data.batches]
        is_first = step == job.resumed_step + 1
        task = f"first step{', with compilation' * is_compiled(config.compile)}"
        with busy(task) if is_first else nullcontext():
            result = job.trainer.step(step, batches, job.bad_steps.detector)
        taken = Taken(step, data, result)
        if is_first:
            requests.note_training()
        job.reporter.count(step, data_time_s)
        job.bad_steps.count(step, data.cursor)

        data_time_s = _look_ahead(job, stop, step)
        is_last = step == config.training.steps or data.is_last
        due = due_after(
            step,
            config,
            is_first=is_first,
            is_last=is_last,
            is_asked_to_stop=stop.is_over(step),
        )
        if due.look:
            job.bad_steps.raise_or_report()
        if due.log:
            job.heart.beat("report", step)
            job.reporter.report(step, _figures(job, stop, taken, due))
        is_over = due.stop or (due.validate and stop.is_over(step))
        is_best = config.checkpoint.keep_best and due.validate and job.reporter.is_best(step)
        if (due.save or is_best) and not is_over:
            _save(job, taken, is_last=False)
        elif due.is_first and saves(config.checkpoint) and not is_over:
            job.heart.beat("preparing saves", step)
            with job.reporter.paused(None), busy("preparing saves"):
                job.checkpoints.prepare_saves(job.trainer.tensors)
        job.checkpoints.poll()
        if due.is_first or due.validate:
            _set_limit(job, stop, "train_timeout_seconds")
        if due.collect_garbage:
            gc.collect(1)
        profiler.step()
        if stop.takes_trace():
            profiler.request()
    return taken, is_last


def _figures(job: Job, stop: StopCoordinator, taken: Taken, due: Due) -> dict[str, float]:
    """Return the figures of the step that are not rates; waits for the device."""
    config, step, data, result = job.plan.config, taken.step, taken.data, taken.result
    figures = {
        "loss/train": result.loss.item(),
        "optim/grad_norm": result.grad_norm.item(),
        "optim/lr": job.trainer.lr_at(step),
    }
    figures |= {f"data/epochs/{name}": count for name, count in data.epochs.items()}
    figures |= job.bad_steps.figures
    if result.group_norms is not None:
        norms = zip(job.trainer.norm_groups, result.group_norms.tolist(), strict=True)
        figures |= {f"optim/grad_norm/{group}": norm for group, norm in norms}
    if due.is_first:
        figures |= planned_memory(config, dist.get_world_size())
    if allowed := config.training.max_bad_records:
        figures["data/bad_records"] = passed_over = num_bad_records(data.cursor)
        if passed_over > allowed:
            stop.fail(too_many_bad_records(passed_over, allowed), step)
    if job.validate is not None and due.validate:
        if compiles(config):
            _set_limit(job, stop, "init_timeout_seconds")

        def is_stopped() -> bool:
            job.heart.beat("validation")
            return stop.is_over(step)

        with job.reporter.paused("validation"), busy("validating"):
            figures |= job.validate(
                job.trainer.model, is_stopped, partial(stop.fail, last_step=step)
            )
            if job.write_texts is not None:
                job.reporter.add_texts(job.write_texts(job.trainer.model, is_stopped))
        job.heart.beat("report")
    return figures


def _set_limit(
    job: Job,
    stop: StopCoordinator,
    key: Literal["init_timeout_seconds", "train_timeout_seconds"],
) -> None:
    """From now on let no rank wait for another longer than that key of [comm] says."""
    seconds = getattr(job.plan.config.comm, key)
    set_timeout(job.meshes, seconds)
    stop.limit = timedelta(seconds=seconds)
    job.heart.limit(seconds, f"comm.{key}")


def _save(job: Job, taken: Taken, *, is_last: bool, is_done: bool = False) -> None:
    """Save the step; `is_last`: the job ends with it; `is_done`: as no step is left."""
    config = job.plan.config.checkpoint
    job.heart.beat("save", taken.step)
    job.bad_steps.raise_or_report()
    with job.reporter.paused("checkpoint"), busy("saving"):
        manifest = manifest_of(
            job.plan,
            job.sources,
            job.held_out,
            step=taken.step,
            tokens_seen=job.reporter.tokens_seen,
            cursor=whole_cursor(taken.data.cursor),
            loss=taken.result.loss.item(),
            bad_steps=job.bad_steps.state(),
            best_validation=job.reporter.best_validation,
        )
        if is_done and taken.step < job.plan.config.training.steps:
            manifest["data_ended"] = True
        tensors: HasState = job.trainer.tensors
        if is_done and config.last_save_model_only:
            from meshwright.checkpoint.state import ModelTensors

            tensors = ModelTensors(job.trainer.model, getattr(torch, config.export_dtype))
            manifest["model_only"] = True
        job.checkpoints.save(taken.step, tensors, manifest, is_last)


def _finish(job: Job, stop: StopCoordinator, step: int, is_done: bool) -> bool:
    """Close the parts, and say how it ended; return whether the last step is done."""
    config, steps = job.plan.config, job.plan.config.training.steps
    is_new = step > job.resumed_step
    job.loader.close()
    job.bad_steps.close()
    if stop.reason:
        stop.clear_stop_file()
    if failures := stop.failures(step):
        raise_data_error(config.checkpoint, failures, step, is_new=is_new)
    if not is_done:
        if is_new:
            check_resumes(config.checkpoint, f"after step {step} of {steps}: {stop.reason}")
        words = "stopped after step %d of %d: %s; start it again to resume"
        logger.info(words, step, steps, stop.reason)
        note_end(job.plan, step, f"stopped: {stop.reason}")
    else:
        if step < steps:
            logger.info("the data ends here: training.max_epochs = %d", config.training.max_epochs)
        announce_end(job.plan, job.reporter, step, time.perf_counter() - job.since)
        note_end(job.plan, step, "finished")
    barrier()  # the first rank to leave with an error has torchrun end the others
    dist.destroy_process_group()
    return is_done


def _look_ahead(job: Job, stop: StopCoordinator, step: int) -> float:
    """Fetch the data of the two steps after `step`; return the seconds waited.

    If this rank cannot, it tells the others, which hear of it during the first of the two steps.
    """
    job.heart.beat("data", step + 1)
    start, wanted = time.perf_counter(), min(2, job.plan.config.training.steps - step)
    count = job.loader.fetch(wanted)
    if count < wanted and job.loader.error is not None:
        stop.fail(job.loader.error, step + count)
    job.heart.beat("vote on stopping", step)
    return time.perf_counter() - start
