"""The job in three parts: set up (`set_up.py`), loop, finish."""

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from meshwright.checkpoint.manager import CheckpointManager, HasState
from meshwright.config.job_config import Checkpoint, JobConfig, compiles, is_compiled, saves
from meshwright.datasets.loader import StepData, num_bad_records, whole_cursor
from meshwright.datasets.opening import open_training_data, open_validation_data
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.planned import planned_memory
from meshwright.metrics.profiling import Profiler
from meshwright.metrics.records import Sink
from meshwright.parallelisms.meshes import barrier, last_collectives, set_timeout
from meshwright.system.device import ordered_attention
from meshwright.system.errors import ConfigError, DataError, StopRequested, TrainingError
from meshwright.system.log import busy, logger
from meshwright.system.processes import Requests
from meshwright.train.agreement import check_agreement
from meshwright.train.announce import announce_end, note_end, note_failure
from meshwright.train.export import export_last, is_exported, prepare_export
from meshwright.train.preflight import Plan
from meshwright.train.resume import manifest_of, too_many_bad_records
from meshwright.train.set_up import Job, order_attention, set_up, start
from meshwright.train.stop import StopCoordinator, remove_stop_file
from meshwright.train.trainer import StepResult


@dataclass(frozen=True)
class Due:
    """The work after a step, decided once and alike on every rank."""

    is_first: bool
    """The first step of this process: it has compiled, and its figures are logged."""
    stop: bool
    """The job ends with this step; it is saved at the end."""
    validate: bool
    log: bool
    save: bool
    """By the interval; a job that ends saves in any case."""
    collect_garbage: bool

    @property
    def look(self) -> bool:
        """Whether the host needs the device's figures now."""
        return self.log or self.save or self.stop


def _is_save_step(step: int, config: Checkpoint) -> bool:
    return step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)


def due_after(
    step: int, config: JobConfig, *, is_first: bool, is_last: bool, is_asked_to_stop: bool
) -> Due:
    """Decide.

    Args:
        is_last: there is no step after this one, or no data for it.
        is_asked_to_stop: as all ranks have agreed.
    """
    validate = config.validation.enable and (is_last or step % config.validation.freq == 0)
    stop = is_last or is_asked_to_stop
    return Due(
        is_first=is_first,
        stop=stop,
        validate=validate,
        log=is_first or stop or validate or step % config.metrics.log_freq == 0,
        save=saves(config.checkpoint) and not stop and _is_save_step(step, config.checkpoint),
        collect_garbage=step % config.training.gc_freq == 0,
    )


def raise_data_error(
    config: Checkpoint, failures: Mapping[int, Exception], step: int, *, is_new: bool
) -> None:
    """End a job of which some ranks cannot read the data of the step after `step`.

    Args:
        failures: their errors, by rank.
        is_new: this process has taken steps, so starting it again makes progress. Otherwise it is a
            config error: a scheduler that restarts the job would loop forever.

    Raises:
        ConfigError: if the process has taken no step.
        TrainingError: as `check_resumes`.
        DataError: otherwise.
    """
    rank, error = min(failures.items())
    what = f"the data cannot be read after step {step}: rank {rank}: {error}"
    if not is_new:
        raise ConfigError(getattr(error, "key", ""), what)
    check_resumes(config, what)
    raise DataError(f"{what}\n  it is saved; what may pass is over when the job is started again")


def check_resumes(config: Checkpoint, stopped: str) -> None:
    """Check that the same command, run again, resumes from here.

    Otherwise a scheduler that restarts the job would loop forever.

    Raises:
        TrainingError: naming the key that prevents it.
    """
    if not config.enable:
        raise TrainingError(f"{stopped}; what was trained is lost: checkpoint.enable = false")
    if config.load_only:
        raise TrainingError(f"{stopped}; what was trained is lost: checkpoint.load_only = true")
    if config.load_step != -1:
        raise TrainingError(
            f"{stopped}; it is saved, but checkpoint.load_step = {config.load_step} would begin "
            "from there again: leave it out to resume"
        )


def check_has_data(step: int) -> None:
    """Raise `ConfigError` if `step`, for which there is no data, is the first."""
    if step == 1:
        key, fix = "training.max_epochs", "raise it, add data, or lower training.global_batch_size"
        raise ConfigError(key, f"{key}: gives less than one global batch\n  fix: {fix}")


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
        check_agreement(plan, [*sources, *held_out])
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
