"""The job, top to bottom: the ranks meet, set up, loop over steps, and end together."""

import gc
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from meshwright.config.changes import changed
from meshwright.datasets.loader import StepData, whole_cursor
from meshwright.datasets.stream import bad_records
from meshwright.launch.heartbeat import heartbeat_of_this_rank
from meshwright.metrics.sinks import Sink
from meshwright.parallelisms.meshes import Meshes, last_collectives, set_timeout
from meshwright.system.hardware import ordered_attention
from meshwright.system.log import busy, logger
from meshwright.system.processes import Launch, Requests
from meshwright.train.announce import note_failure
from meshwright.train.end import End, check_has_data, end_steps, export_at_end, prepare_export
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resume import manifest_of, too_many_bad_records
from meshwright.train.running_job import RunningJob
from meshwright.train.set_up import init_ranks, set_up
from meshwright.train.step_actions import StepActions, actions_after
from meshwright.train.stop import StopAgreement, remove_stop_file
from meshwright.train.trainer import StepResult

if TYPE_CHECKING:
    from meshwright.checkpoint.state import ModelTensors, TrainingTensors


def run(
    resolved: ResolvedJob,
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
        TrainingError: if more steps were skipped than allowed; or if it was asked to stop, and
            the same command wouldn't resume from there.
    """
    if requests is None:
        with Requests() as requests:
            return run(resolved, extra_sinks, requests, launch)
    launch = launch or Launch()
    heartbeat = heartbeat_of_this_rank(launch.folder)
    heartbeat.answer(last_collectives)
    last, begun, stage = resolved.training_stages[-1], time.monotonic(), resolved
    meshes: Meshes | None = None
    while True:
        heartbeat.limit(stage.config.comm.init_timeout_seconds, "comm.init_timeout_seconds")
        heartbeat.update(meeting := "meeting the other ranks")
        with heartbeat.guard(), busy(meeting):
            stage, device, checkpoints = init_ranks(stage, launch)
        is_first, last = stage.stage_number == resolved.stage_number, stage.training_stages[-1]
        try:
            if is_first:
                remove_stop_file(Path(resolved.config.job.dump_folder))
            heartbeat.update("set-up")
            with heartbeat.guard(), busy("set-up"):
                prepare_export(last.config)
                job = set_up(stage, device, checkpoints, heartbeat, launch, extra_sinks, meshes)
            end = End.DONE
            if job is not None:
                begun = time.monotonic() if is_first else begun
                with ordered_attention(job.attention):
                    end = _train(job, requests, begun)
        finally:
            checkpoints.release()
        if job is None or job.resolved.next_stage is None or end is not End.STAGE:
            break
        # from the checkpoint of this stage, whichever it started with
        following = job.resolved.next_stage
        config = changed(following.config, {"checkpoint": {"load_step": -1}})
        stage, meshes, job = replace(following, config=config), job.meshes, None
        _free_memory()
    rank = dist.get_rank()
    dist.destroy_process_group()
    heartbeat.limit(0, "")  # nobody waits for the export
    return end is not End.STOPPED and (rank > 0 or export_at_end(last, requests))


def _free_memory() -> None:
    """Free the model of a stage before the next one is built, and its compiled graphs: another
    sequence length would be taken for a shape that changes, and compiled for all lengths."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    torch.cuda.empty_cache()  # does nothing without a GPU


def _train(job: RunningJob, requests: Requests, begun: float) -> End:
    """Take the steps of a stage and save the last; return how they ended."""
    config = job.resolved.config
    with note_failure(job.resolved, lambda: job.reporter.step):
        # a rank that is asked before it gets here ends; its peers aren't to wait for it in here
        agreement = StopAgreement(
            Path(config.job.dump_folder), config.job.max_run_seconds, requests, begun
        )
        with requests.held(), ExitStack() as stack:
            for observer in job.observers.values():
                stack.enter_context(observer)
            steps = Steps(job, agreement, requests)
            with job.checkpoints, job.heartbeat.guard():
                steps.take()
            with job.phase("end", steps.step):
                return end_steps(job, agreement, steps.step, is_complete=steps.is_complete)


@dataclass(frozen=True)
class FinishedStep:
    """A step that was handed to the device, which may still compute it."""

    step: int
    data: StepData
    result: StepResult


def take_step(job: RunningJob, step: int, data: StepData) -> FinishedStep:
    """Hand a step to the device, and tell observers. Collective."""
    with job.phase("copying its batches to the device", step):
        batches = [batch.to(job.device, non_blocking=True) for batch in data.batches]
    is_first = step == job.resolved.resume_step + 1
    with job.phase("first step", step, is_long=True) if is_first else nullcontext():
        result = job.trainer.step(step, batches, job.detector)
    job.step_record.add(step, result)
    for observer in job.observers.values():
        observer.after_step(step, data.cursor.counts)
    return FinishedStep(step, data, result)


def figures_of(job: RunningJob, finished: FinishedStep) -> dict[str, float]:
    """Return the metrics of the step that aren't rates; waits for the device."""
    figures = job.trainer.figures_of(finished.step, finished.result) | finished.data.figures
    for observer in job.observers.values():
        figures |= observer.figures()
    return figures


class Steps:
    """The steps of one stage: fetch its data, take it, decide, report it, save it.

    Attributes:
        step: the last one that was taken, or that the job resumes from.
        is_complete: no step is left: all are taken, or the data has ended.
    """

    def __init__(self, job: RunningJob, agreement: StopAgreement, requests: Requests) -> None:
        self._job, self._agreement, self._requests = job, agreement, requests
        self._config = job.resolved.config
        self._saves = self._config.checkpoint.saves
        self.step = job.resolved.resume_step
        self.is_complete = False

    def take(self) -> None:
        """Take steps until the ranks agree to stop or none is left; save the last."""
        job, agreement = self._job, self._agreement
        waited_s, finished = self._fetch(), None
        agreement.send()
        is_over = self._is_last_for_all()
        if self._config.compile.is_on and not is_over:
            logger.info(
                "the first step compiles: minutes, or seconds if a job like it has run here"
            )
        while not is_over:
            data = next(job.loader, None)
            if data is None:
                check_has_data(self.step + 1)
                self.is_complete = True
                break
            # on whether this step is the last: the answers arrive while the device computes it
            agreement.send()
            finished = self._step(data)
            job.reporter.count(self.step, waited_s)
            waited_s = self._fetch()
            actions = self._decide()
            self._report(finished, actions)
            # a validation may have heard of a request meanwhile
            is_over = actions.stop or agreement.decision.is_last(self.step)
            if not is_over:
                self._save_if_due(finished, actions)
            self._finish_step(actions)
        if finished is not None and self._saves:
            save(job, finished, is_last=True, is_complete=self.is_complete)

    @property
    def _is_first(self) -> bool:
        """Whether the last step is the first of this process."""
        return self.step == self._job.resolved.resume_step + 1

    def _fetch(self) -> float:
        """Fetch the data of the next two steps; return the seconds waited. If this rank can't, it
        says so during the first of the two, and no rank takes the second."""
        start, wanted = time.perf_counter(), min(2, self._config.training.steps - self.step)
        loader = self._job.loader
        with self._job.phase("data", self.step + 1):
            count = loader.fetch(wanted)
        if count < wanted and loader.error is not None:
            self._agreement.fail(loader.error, self.step + count)
        return time.perf_counter() - start

    def _step(self, data: StepData) -> FinishedStep:
        """Hand the next step to the device."""
        self.step += 1
        finished = take_step(self._job, self.step, data)
        if self._is_first:
            self._requests.note_training()
        return finished

    def _decide(self) -> StepActions:
        """Decide on the work after the step, with the other ranks. Collective."""
        self.is_complete = self.step == self._config.training.steps or self._job.loader.is_at_end
        return actions_after(
            self.step,
            self._config,
            is_first=self._is_first,
            is_last=self.is_complete,
            is_asked_to_stop=self._is_last_for_all(),
        )

    def _is_last_for_all(self) -> bool:
        """Return whether the ranks agree that no step follows. Collective."""
        with self._job.phase("vote on stopping", self.step):
            return self._agreement.receive().is_last(self.step)

    def _report(self, finished: FinishedStep, actions: StepActions) -> None:
        """Check the step, and write its record; waits for the device where one is due."""
        job, step = self._job, finished.step
        if actions.needs_host_figures:
            with job.phase("looking for skipped steps", step):
                _check(job)
        if not actions.log:
            return
        with job.phase("report", step):
            figures = self._figures(finished)
        if actions.validate and job.validate is not None:
            figures |= self._validate()
        with job.phase("report", step):
            record = job.reporter.report(step, figures)
            with job.reporter.paused(None):
                for observer in job.observers.values():
                    observer.on_report(record)

    def _figures(self, finished: FinishedStep) -> dict[str, float]:
        """Return the same, with the bad records of all ranks, which may end the job."""
        figures, cursor = figures_of(self._job, finished), finished.data.cursor
        if allowed := self._config.training.max_bad_records:
            figures["data/bad_records"] = passed_over = bad_records(whole_cursor(cursor))
            if passed_over > allowed:
                self._agreement.fail(too_many_bad_records(passed_over, allowed), self.step)
        return figures

    def _validate(self) -> dict[str, float]:
        """Evaluate the model until the ranks agree to stop; let observers do their part."""
        job, agreement = self._job, self._agreement
        if self._config.compiles_validation:
            self._set_limit("init_timeout_seconds")

        def is_stopped() -> bool:
            job.heartbeat.update("validation")
            agreement.send()
            return agreement.receive().is_last(self.step)

        assert job.validate is not None
        fail = partial(agreement.fail, last_step=self.step)
        evaluate = partial(job.validate, job.trainer.model, is_stopped, fail)
        with job.phase("validation", self.step):
            figures = evaluate()
            for observer in job.observers.values():
                figures |= observer.on_validation(evaluate, is_stopped)
        return figures

    def _save_if_due(self, finished: FinishedStep, actions: StepActions) -> None:
        """Save the step, if its number or an observer says so."""
        job = self._job
        wants_save = [observer.wants_save(self.step) for observer in job.observers.values()]
        if actions.save or any(wants_save):
            save(job, finished, is_last=False)
        elif self._is_first and self._saves:
            with job.phase("preparing saves", self.step):
                job.checkpoints.prepare_saves(job.trainer.tensors)

    def _finish_step(self, actions: StepActions) -> None:
        """Finish the rest before the next step."""
        job = self._job
        job.checkpoints.poll()
        if self._is_first or actions.validate:
            self._set_limit("train_timeout_seconds")
        if actions.collect_garbage:
            gc.collect(1)
        takes_trace = self._agreement.takes_trace()
        for observer in job.observers.values():
            observer.on_step_end()
            if takes_trace:
                observer.on_trace_request()

    def _set_limit(self, key: Literal["init_timeout_seconds", "train_timeout_seconds"]) -> None:
        """From now on let no rank wait for a different longer than that key of [comm] says."""
        seconds = getattr(self._config.comm, key)
        set_timeout(self._job.meshes, seconds)
        self._agreement.limit = timedelta(seconds=seconds)
        self._job.heartbeat.limit(seconds, f"comm.{key}")


def save(
    job: RunningJob, finished: FinishedStep, *, is_last: bool, is_complete: bool = False
) -> None:
    """Save a step.

    Args:
        is_last: the job ends with it.
        is_complete: as no step is left.
    """
    config = job.resolved.config.checkpoint
    with job.phase("save", finished.step):
        _check(job)
        manifest = manifest_of(
            job.resolved,
            job.sources,
            job.validation_sources,
            step=finished.step,
            tokens_seen=job.reporter.tokens_seen,
            cursor=whole_cursor(finished.data.cursor),
            loss=finished.result.loss.item(),
            observers=job.observers,
        )
        if is_complete and finished.step < job.resolved.config.training.steps:
            manifest["data_ended"] = True
        tensors: TrainingTensors | ModelTensors = job.trainer.tensors
        if is_complete and config.last_save_model_only:
            tensors = job.trainer.model_tensors(getattr(torch, config.export_dtype))
            manifest["model_only"] = True
        job.checkpoints.save(finished.step, tensors, manifest, is_last)


def _check(job: RunningJob) -> None:
    """Let observers look at the device's results, and end the job."""
    for observer in job.observers.values():
        observer.check()
