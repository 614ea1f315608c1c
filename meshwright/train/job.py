"""The job, top to bottom: the ranks meet, set up, loop over steps, and end together."""

import gc
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from meshwright.config.job_config import JobConfig, changed
from meshwright.datasets.loader import StepData, whole_cursor
from meshwright.datasets.stream import bad_records
from meshwright.launch.heartbeat import heartbeat_of_this_rank
from meshwright.metrics.profiling import Profiler
from meshwright.metrics.sinks import Sink
from meshwright.parallelisms.meshes import Meshes, barrier, last_collectives, set_timeout
from meshwright.system.hardware import ordered_attention
from meshwright.system.log import busy, logger
from meshwright.system.processes import Launch, Requests
from meshwright.train.announce import announce_end, note_end, note_failure
from meshwright.train.end import (
    check_has_data,
    check_resumes,
    export_at_end,
    prepare_export,
    raise_data_error,
)
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resume import manifest_of, too_many_bad_records
from meshwright.train.set_up import Job, init_ranks, set_up
from meshwright.train.stop import StopAgreement, remove_stop_file
from meshwright.train.trainer import StepResult
from meshwright.train.validation import write_texts

if TYPE_CHECKING:
    from meshwright.checkpoint.state import ModelTensors, TrainingTensors


@dataclass(frozen=True)
class Due:
    """The work after a step, decided once and alike on every rank."""

    stop: bool
    """The job ends with this step; it is saved at the end."""
    validate: bool
    log: bool
    save: bool
    """By the interval; a job that ends saves in any case."""
    save_if_best: bool
    collect_garbage: bool

    @property
    def look(self) -> bool:
        """Whether the host needs the device's figures now."""
        return self.log or self.save or self.stop


def due_after(
    step: int, config: JobConfig, *, is_first: bool, is_last: bool, is_asked_to_stop: bool
) -> Due:
    """Decide; `is_last`: there is no step after this one, or no data for it."""
    validate = config.validation.enable and (is_last or step % config.validation.freq == 0)
    stop, saves = is_last or is_asked_to_stop, config.checkpoint
    is_save_step = step % saves.interval == 0 or (step == 1 and saves.enable_first_step_checkpoint)
    return Due(
        stop=stop,
        validate=validate,
        log=is_first or stop or validate or step % config.metrics.log_freq == 0,
        save=saves.saves and not stop and is_save_step,
        save_if_best=saves.saves and saves.keep_best and validate,
        collect_garbage=step % config.training.gc_freq == 0,
    )


@dataclass(frozen=True)
class Taken:
    """A step that has been taken."""

    step: int
    data: StepData
    result: StepResult


def run(
    plan: ResolvedJob,
    extra_sinks: Sequence[Sink] = (),
    requests: Requests | None = None,
    launch: Launch | None = None,
) -> bool:
    """Train from the start or the last checkpoint to the last step, or until asked to stop.

    Args:
        extra_sinks: in addition to the config's.
        requests: to stop; None: only signals from now on.
        launch: as our launcher tells it; None: there is none.

    Returns:
        Whether the last step is done, and exported if that is asked for.

    Raises:
        StopRequested: if asked before the first step.
        TrainingError: if there were more bad steps than allowed; or if it was asked to stop, and
            the same command would not resume from there.
    """
    if requests is None:
        with Requests() as requests:
            return run(plan, extra_sinks, requests, launch)
    launch = launch or Launch()
    heartbeat = heartbeat_of_this_rank(launch.folder)
    heartbeat.answer(last_collectives)
    last, begun, is_done, stage = plan.training_stages[-1], time.monotonic(), True, plan
    meshes: Meshes | None = None
    while is_done:
        heartbeat.limit(stage.config.comm.init_timeout_seconds, "comm.init_timeout_seconds")
        heartbeat.update(meeting := "meeting the other ranks")
        with heartbeat.guard(), busy(meeting):
            stage, device, checkpoints = init_ranks(stage, launch)
        is_first, last = stage.stage_number == plan.stage_number, stage.training_stages[-1]
        try:
            if is_first:
                remove_stop_file(Path(plan.config.job.dump_folder))
            heartbeat.update("set-up")
            with heartbeat.guard(), busy("set-up"):
                prepare_export(last.config)
                job = set_up(stage, device, checkpoints, heartbeat, launch, extra_sinks, meshes)
            if job is not None:
                begun = time.monotonic() if is_first else begun
                with ordered_attention(job.attention):
                    is_done = _train(job, requests, begun)
            following = None if job is None else job.plan.next_stage
        finally:
            checkpoints.release()
        if job is None or following is None:
            break
        # from the checkpoint of this stage, whichever it began with
        config = changed(following.config, {"checkpoint": {"load_step": -1}})
        stage, meshes, job = replace(following, config=config), job.meshes, None
        _forget()
    rank = dist.get_rank()
    dist.destroy_process_group()
    heartbeat.limit(0, "")  # nobody waits for the export
    return is_done and (rank > 0 or export_at_end(last, requests))


def _forget() -> None:
    """Free the model of a stage before the next one is built, and its compiled graphs: another
    sequence length would be taken for a shape that changes, and compiled for all lengths."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    torch.cuda.empty_cache()  # does nothing without a GPU


def _train(job: Job, requests: Requests, begun: float) -> bool:
    """Take the steps of a stage and save the last; return whether none is left."""
    config, dump_folder = job.plan.config, Path(job.plan.config.job.dump_folder)
    rank, step = dist.get_rank(), job.plan.resume_step
    with note_failure(job.plan, lambda: job.reporter.step):
        # a rank that is asked before it gets here ends; its peers are not to wait for it in here
        agreement = StopAgreement(dump_folder, config.job.max_run_seconds, requests, begun)
        with requests.held(), closing(job.reporter):
            with (
                Profiler(config.profiling, dump_folder, rank, step) as profiler,
                job.checkpoints,
                job.heartbeat.guard(),
            ):
                taken, is_done = _loop(job, agreement, profiler, requests)
                if taken is not None and config.checkpoint.saves:
                    save(job, taken, is_last=True, is_done=is_done)
            step = taken.step if taken is not None else step
            with job.phase("end", step):
                return _end(job, agreement, step, is_done)


def _loop(
    job: Job, agreement: StopAgreement, profiler: Profiler, requests: Requests
) -> tuple[Taken | None, bool]:
    """Take steps until the ranks decide to stop or none is left; return the last one, and whether
    none is left: all are taken, or the data has ended."""
    config, step, taken, is_last = job.plan.config, job.plan.resume_step, None, False
    waited_s = _fetch(job, agreement, step)
    agreement.send()
    is_over = _decide(job, agreement, step)
    if config.compile.is_on and not is_over:
        logger.info("the first step compiles: minutes, or seconds if a job like it has run here")
    while not is_over:
        data = next(job.loader, None)
        if data is None:
            check_has_data(step + 1)
            return taken, True
        step += 1
        is_first = step == job.plan.resume_step + 1
        agreement.send()  # on whether this step is the last; received after it
        with job.phase("copying its batches to the device", step):
            batches = [batch.to(job.device, non_blocking=True) for batch in data.batches]
        with job.phase("first step", step, is_long=True) if is_first else nullcontext():
            result = job.trainer.step(step, batches, job.bad_steps.detector)
        taken = Taken(step, data, result)
        if is_first:
            requests.note_training()
        job.reporter.count(step, waited_s)
        job.bad_steps.count(step, data.cursor)
        waited_s = _fetch(job, agreement, step)
        is_last = step == config.training.steps or job.loader.is_at_end
        is_over = _decide(job, agreement, step)
        due = due_after(step, config, is_first=is_first, is_last=is_last, is_asked_to_stop=is_over)
        if due.look:
            with job.phase("looking for bad steps", step):
                job.bad_steps.raise_or_report()
        if due.log:
            _report(job, agreement, taken, due)
        is_over = due.stop or agreement.decision.is_last(step)
        is_best = due.save_if_best and job.reporter.is_best(step)
        if (due.save or is_best) and not is_over:
            save(job, taken, is_last=False)
        elif is_first and config.checkpoint.saves and not is_over:
            with job.phase("preparing saves", step):
                job.checkpoints.prepare_saves(job.trainer.tensors)
        job.checkpoints.poll()
        if is_first or due.validate:
            _set_limit(job, agreement, "train_timeout_seconds")
        if due.collect_garbage:
            gc.collect(1)
        profiler.step()
        if agreement.takes_trace():
            profiler.request()
    return taken, is_last


def _fetch(job: Job, agreement: StopAgreement, step: int) -> float:
    """Fetch the data of the two steps after `step`; return the seconds waited. If this rank cannot,
    it says so during the first of the two, and no rank takes the second."""
    start, wanted = time.perf_counter(), min(2, job.plan.config.training.steps - step)
    with job.phase("data", step + 1):
        count = job.loader.fetch(wanted)
    if count < wanted and job.loader.error is not None:
        agreement.fail(job.loader.error, step + count)
    return time.perf_counter() - start


def _decide(job: Job, agreement: StopAgreement, step: int) -> bool:
    """Return whether the ranks agree that `step` is the last. Collective."""
    with job.phase("vote on stopping", step):
        return agreement.receive().is_last(step)


def _report(job: Job, agreement: StopAgreement, taken: Taken, due: Due) -> None:
    """Write the record of a step; waits for the device."""
    with job.phase("report", taken.step):
        figures = _figures(job, agreement, taken)
    if due.validate and job.validate is not None:
        figures |= _validate(job, agreement, taken.step)
    with job.phase("report", taken.step):
        job.reporter.report(taken.step, figures)


def _figures(job: Job, agreement: StopAgreement, taken: Taken) -> dict[str, float]:
    """Return the figures of the step that are not rates; waits for the device."""
    step, data = taken.step, taken.data
    figures = job.trainer.figures_of(step, taken.result) | data.figures | job.bad_steps.figures
    if allowed := job.plan.config.training.max_bad_records:
        figures["data/bad_records"] = passed_over = bad_records(whole_cursor(data.cursor))
        if passed_over > allowed:
            agreement.fail(too_many_bad_records(passed_over, allowed), step)
    return figures


def _validate(job: Job, agreement: StopAgreement, step: int) -> dict[str, float]:
    """Evaluate the model, and have it continue the prompts, until the ranks decide to stop."""
    assert job.validate is not None
    if job.plan.config.compiles_validation:
        _set_limit(job, agreement, "init_timeout_seconds")

    def is_stopped() -> bool:
        job.heartbeat.update("validation")
        agreement.send()
        return agreement.receive().is_last(step)

    with job.phase("validation", step):
        fail = partial(agreement.fail, last_step=step)
        figures = job.validate(job.trainer.model, is_stopped, fail, job.trainer.average)
        if job.plan.config.validation.sample_prompts:
            texts = write_texts(job.plan, job.meshes, job.trainer.model, is_stopped)
            job.reporter.add_texts(texts)
    return figures


def _set_limit(
    job: Job,
    agreement: StopAgreement,
    key: Literal["init_timeout_seconds", "train_timeout_seconds"],
) -> None:
    """From now on let no rank wait for another longer than that key of [comm] says."""
    seconds = getattr(job.plan.config.comm, key)
    set_timeout(job.meshes, seconds)
    agreement.limit = timedelta(seconds=seconds)
    job.heartbeat.limit(seconds, f"comm.{key}")


def save(job: Job, taken: Taken, *, is_last: bool, is_done: bool = False) -> None:
    """Save the step; `is_last`: the job ends with it; `is_done`: as no step is left."""
    config = job.plan.config.checkpoint
    with job.phase("save", taken.step):
        job.bad_steps.raise_or_report()
        manifest = manifest_of(
            job.plan,
            job.sources,
            job.validation_sources,
            step=taken.step,
            tokens_seen=job.reporter.tokens_seen,
            cursor=whole_cursor(taken.data.cursor),
            loss=taken.result.loss.item(),
            bad_steps=job.bad_steps.state(),
            best_validation=job.reporter.best_validation,
        )
        if is_done and taken.step < job.plan.config.training.steps:
            manifest["data_ended"] = True
        tensors: TrainingTensors | ModelTensors = job.trainer.tensors
        if is_done and config.last_save_model_only:
            from meshwright.checkpoint import state  # late, as the trainer's

            average = None if job.trainer.average is None else job.trainer.average.tensors
            dtype = getattr(torch, config.export_dtype)
            tensors = state.ModelTensors(job.trainer.model, dtype, average)
            manifest["model_only"] = True
        job.checkpoints.save(taken.step, tensors, manifest, is_last)


def _end(job: Job, agreement: StopAgreement, step: int, is_done: bool) -> bool:
    """Close the parts, and say how it ended; return whether the last step is done."""
    config, steps, reason = (
        job.plan.config,
        job.plan.config.training.steps,
        agreement.decision.reason,
    )
    is_new, following = step > job.plan.resume_step, job.plan.next_stage
    is_done = is_done and not (reason and following)
    job.loader.close()
    job.bad_steps.close()
    if reason:
        agreement.clear_stop_file()
    if failures := agreement.failures(step):
        raise_data_error(config.checkpoint, failures, step, is_new=is_new)
    if not is_done:
        if is_new:
            check_resumes(config.checkpoint, f"after step {step} of {job.plan.steps}: {reason}")
        words = "stopped after step %d of %d: %s; start it again to resume"
        logger.info(words, step, job.plan.steps, reason)
        note_end(job.plan, step, f"stopped: {reason}")
    elif following is not None:
        logger.info("stage %d ends with step %d", job.plan.stage_number, step)
        note_end(job.plan, step, f"finished stage {job.plan.stage_number}")
    else:
        if step < steps:
            logger.info("the data ends here: training.max_epochs = %d", config.training.max_epochs)
        announce_end(job.plan, job.reporter, step, time.perf_counter() - job.since)
        note_end(job.plan, step, "finished")
    barrier()  # the first rank to leave with an error has torchrun end the others
    # the next stage makes its own: each has threads, and a connection to every other rank
    for group in (agreement.group, job.checkpoints.group):
        dist.destroy_process_group(group)
    return is_done
