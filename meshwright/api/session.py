"""A job on one rank in the caller's process, which takes steps when it is asked to."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright.api.child_commands import run_with_config
from meshwright.api.surroundings import restored_process, usual_torch
from meshwright.checkpoint import listing
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.datasets.ranges import close_files
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.sinks import Sink
from meshwright.system.errors import ConfigError, check
from meshwright.system.hardware import ordered_attention
from meshwright.system.processes import Launch
from meshwright.train.announce import note_end
from meshwright.train.end import check_has_data
from meshwright.train.facts import look, look_at_files
from meshwright.train.job import FinishedStep, figures_of, save, take_step
from meshwright.train.resolve import ResolvedJob, resolve
from meshwright.train.running_job import RunningJob
from meshwright.train.set_up import init_ranks, set_up
from meshwright.train.validation import evaluate_texts


@dataclass(frozen=True)
class Step:
    """The results of one optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the target tokens of the global batch, in nats."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the step."""
    metrics: dict[str, float]
    """All metrics of the step by the names of metrics.jsonl; with the rates, if it is logged."""


class Session:
    """A job on one rank in this process, as `meshwright train` would run it on one.

    It resumes as the command does, writes the same files to `job.dump_folder`, and takes the same
    steps, to the bit. It evaluates and saves only when it is asked to. It installs no signal
    handlers, and logs to Python's logger "meshwright", which is yours to configure. `close`, or the
    end of `with`, leaves the process as it was. One session at a time.

    Args:
        config: as `load` returns it.
        sinks: further ones for the records of logged steps: objects with `write(record)` and
            `close()`.

    Raises:
        ConfigError: if the job can't run on one rank, or has no step left.
    """

    def __init__(self, config: JobConfig, sinks: Sequence[Sink] = ()) -> None:
        _check_free()
        self._finished: FinishedStep | None = None
        self._saved_step = 0
        self._is_broken = False
        with ExitStack() as stack:
            stack.enter_context(restored_process())
            collects = gc.isenabled()
            resolved = _resolve(config)
            # in its own process, because it starts others, which would import the caller's
            run_with_config(config, "tokenize")
            with usual_torch():
                self._job = _open(resolved, sinks, stack)
            if collects:  # no other rank waits for a collection
                gc.enable()
            self._stack = stack.pop_all()
        self._is_open = True

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config(self) -> JobConfig:
        """The job's config, with -1 and "auto" filled in."""
        return self._job.resolved.config

    @property
    def model(self) -> nn.Module:
        """The model that is trained: (B, S) token ids -> (B, S, V) logits, S at most
        `training.seq_len`."""
        return self._job.trainer.model.stages[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The job's tokenizer: `encode(text)` and `decode(ids)`."""
        return self._job.resolved.tokenizer

    @property
    def step(self) -> int:
        """The last step that was taken; before the first one, the step that it resumes from."""
        return self._job.resolved.resume_step if self._finished is None else self._finished.step

    def steps(self, count: int | None = None) -> Iterator[Step]:
        """Take the next steps, and yield the results of each.

        Args:
            count: how many at most; None: all up to `training.steps`.

        Raises:
            TrainingError: after a non-finite step or a loss spike, as `bad_steps` says.
            ConfigError, DataError: if the data can't be read.
            ConfigError: after any error or interrupt within a step.
        """
        check(count is None or count >= 0, "count", count, "must not be negative")
        last = self.config.training.steps
        if count is not None:
            last = min(last, self.step + count)
        while self.step < last and (result := self._take_step()) is not None:
            yield result

    def evaluate(self, texts: Sequence[str] | None = None) -> dict[str, float]:
        """Return loss, perplexity and bits per byte of the model as it is now.

        Args:
            `texts`: to evaluate it on: each between BOS and EOS, where the tokenizer has them, in
                parts of `training.seq_len` tokens. None: on the job's validation data; the names
                are then those of metrics.jsonl.

        Raises:
            ConfigError: if there are neither text nor validation data.
        """
        self._check_open()
        job = self._job
        with usual_torch(), ordered_attention(job.attention):
            if texts is not None:
                return evaluate_texts(
                    job.resolved, job.trainer.model, texts, job.meshes, job.device
                )
            fix = "validation.enable = true, or pass text"
            check(job.validate is not None, "validation.enable", False, "there is no data", fix)
            assert job.validate is not None
            return job.validate(job.trainer.model, lambda: False, _raise)

    def save(self) -> Path:
        """Save a checkpoint of the last step, from which a job resumes on any mesh.

        Returns:
            The step's folder, in `job.dump_folder`.

        Raises:
            ConfigError: if checkpoints are off, or there is no new step.
            SaveError: if it can't be written.
        """
        self._check_open()
        job, finished = self._job, self._finished
        rule, fix = "the job saves no checkpoints", "set it to true"
        check(self.config.checkpoint.saves, "checkpoint.enable", False, rule, fix)
        self._check_whole()
        if finished is None or finished.step == self._saved_step:
            raise ConfigError("", "save: there is no new step\n  fix: take one, with steps(1)")
        is_complete = finished.step == self.config.training.steps or job.loader.is_at_end
        with usual_torch():
            save(job, finished, is_last=True, is_complete=is_complete)
        self._saved_step = finished.step
        return listing.step_folder(job.resolved.checkpoint_folder, finished.step)

    def close(self) -> None:
        """Close its files, and leave the process as it was. The model stays."""
        if self._is_open:
            self._is_open = False
            how = "finished" if self.step == self.config.training.steps else "stopped: closed"
            with self._stack:
                note_end(self._job.resolved, self.step, how)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError("", "the Session is closed\n  fix: make another")

    def _check_whole(self) -> None:
        if self._is_broken:
            what = "the last step didn't end, so weights and data may be ahead of it"
            fix = "make another Session, which resumes from the last checkpoint"
            raise ConfigError("", f"{what}\n  fix: {fix}")

    def _take_step(self) -> Step | None:
        """Take the next step; None: the data ends."""
        self._check_open()
        self._check_whole()
        try:
            with usual_torch():
                return self._take_whole_step()
        except BaseException:  # Ctrl-C in a notebook, too
            self._is_broken = True
            raise

    def _take_whole_step(self) -> Step | None:
        job, step = self._job, self.step + 1
        data = next(job.loader, None)
        if data is None:
            check_has_data(step)
            return None
        job.trainer.forget()  # of the caller's own use of the model
        with ordered_attention(job.attention):
            self._finished = finished = take_step(job, step, data)
        job.reporter.count(step, 0.0)
        for observer in job.observers.values():
            observer.check()
        metrics = figures_of(job, finished)
        is_last = step == self.config.training.steps
        if step == 1 or is_last or step % self.config.metrics.log_freq == 0:
            metrics = job.reporter.report(step, metrics)
            for observer in job.observers.values():
                observer.on_report(metrics)
        for observer in job.observers.values():
            observer.on_step_end()
        loss, norm = metrics["loss/train"], metrics["optim/grad_norm"]
        return Step(step, loss, norm, metrics["optim/lr"], dict(metrics))


def _raise(error: Exception) -> None:
    raise error


def _check_free() -> None:
    """Raise `ConfigError` if this process is a rank of a job already."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        fix = "meshwright train, which runs a job on many ranks"
        raise ConfigError("", f"a Session is one rank, and WORLD_SIZE is {size}\n  fix: {fix}")
    if dist.is_initialized():
        fix = "close the Session that is open, or torch.distributed.destroy_process_group()"
        raise ConfigError("", f"this process has a process group already\n  fix: {fix}")


def _resolve(config: JobConfig) -> ResolvedJob:
    """Return the job on one rank of this machine."""
    rule, fix = "a Session takes the steps of one stage", "train it with meshwright train"
    num_stages = len(config.training.stages)
    check(num_stages == 0, "training.stages", num_stages, rule, fix)
    # `save` returns when the checkpoint is there; and the caller may change the folder meanwhile,
    # as by %cd in a notebook
    folder = os.path.abspath(config.job.dump_folder)
    update = {"checkpoint": {"async_mode": "disabled"}, "job": {"dump_folder": folder}}
    config = changed(config, update)
    has_gpu = torch.cuda.is_available()
    device_type = "cuda" if has_gpu else "cpu"
    facts = look(config, 1, expects_gpus=has_gpu, device_type=device_type)
    return resolve(config, look_at_files(config, facts))


def _open(resolved: ResolvedJob, sinks: Sequence[Sink], stack: ExitStack) -> RunningJob:
    """Make the job ready for its next step; `stack` ends it."""
    stack.callback(_leave_group)
    stack.callback(close_files)
    resolved, device, checkpoints = init_ranks(resolved, Launch())
    stack.callback(checkpoints.release)
    job = set_up(resolved, device, checkpoints, Heartbeat(), Launch(), sinks, logs_to_file=False)
    if job is None:
        step, where = resolved.resume_step, resolved.checkpoint_folder
        fix = "raise training.steps, or use another job.dump_folder"
        raise ConfigError("", f"{where} holds step {step}, the last of the job\n  fix: {fix}")
    stack.enter_context(job.checkpoints)
    for observer in job.observers.values():
        stack.enter_context(observer)
    stack.callback(job.loader.close)
    return job


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
