"""The trainer's own job on one rank of a small mesh, with synthetic data and its own clock."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import listing
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.state import RNG
from meshwright.commands.prove.data import Vocabulary, first_cursor, open_source, parts_of
from meshwright.commands.prove.measurement import LAST_RESUMED_STEP
from meshwright.commands.prove.weights import prepare_weights, show_attention
from meshwright.config.changes import changed
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.config.training import BadSteps
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.reporter import SinkWriter
from meshwright.metrics.sinks import Record
from meshwright.models.loss import PADDING, Batch
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.shards import local_shard
from meshwright.system import hardware
from meshwright.system.processes import Launch
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.facts import JobFacts, look
from meshwright.train.job import FinishedStep, save
from meshwright.train.optim.update import LR_SCALE
from meshwright.train.resolve import resolve
from meshwright.train.running_job import RunningJob
from meshwright.train.set_up import Data, set_up
from meshwright.train.trainer import Trainer

Samples = dict[tuple[int, int], str]
"""Hashes of samples, by step and index in the global batch."""

# Process groups are never freed, so all cases of a pool share them.
_meshes = functools.cache(build_meshes)


@functools.cache
def _checkpoints(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, Checkpoint(enable=True))


def own_device() -> torch.device:
    """Return this rank's GPU, made current, if its collectives are NCCL's; else the CPU."""
    if dist.get_backend() == "nccl":
        return hardware.pick_device(int(os.environ["LOCAL_RANK"]), num_expected=1)
    return torch.device("cpu")


def look_on(device: torch.device, config: JobConfig, world_size: int) -> JobFacts:
    """Return the facts of a small job, and have a GPU take deterministic kernels or not."""
    if device.type == "cpu":
        return look(config, world_size)
    hardware.make_deterministic()
    torch.use_deterministic_algorithms(config.training.deterministic)
    torch.set_float32_matmul_precision("highest")
    return look(
        config,
        world_size,
        expects_gpus=True,
        device_type=device.type,
        device_memory_gib=hardware.memory_gib(device),
        has_float8=hardware.has_float8(device),
    )


def clear_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of the case before, or of one that broke off. Collective."""
    if dist.get_rank() == 0:
        # not the folder itself: a save warns if that is gone
        for step in folder.glob("*"):
            shutil.rmtree(step)
    dist.barrier()


class ProofJob:
    """One rank's part of a small job, built, saved and resumed as any other job is.

    Every method is collective.

    Args:
        config: of a case.
        root: folder for checkpoints and records, the same on every rank; jobs on as many ranks take
            each other's place there.

    Attributes:
        running: the trainer's job: a new one, or after `resume` the one that has resumed.
        is_token: of each position of this rank's last step, (sequences, 1 + k, S) bool: no padding,
            there and, at each of k depths of MTP, so many places further.
    """

    is_token: Tensor

    def __init__(self, config: JobConfig, world_size: int, root: Path) -> None:
        dump_folder = root / f"{world_size} ranks"
        folders: dict[str, dict[str, Any]] = {
            "job": {"dump_folder": str(dump_folder)},
            "checkpoint": {"enable": True},
        }
        config = changed(config, folders)
        self._device = own_device()
        clear_checkpoints(dump_folder / config.checkpoint.folder)
        self.resolved = resolve(config, look_on(self._device, config, world_size))
        vocabulary = Vocabulary(self.resolved.model_args.vocab_size)
        self.resolved = dataclasses.replace(self.resolved, tokenizer=vocabulary)
        training = self.resolved.config.training
        size = vocabulary.vocab_size
        sources = [open_source(training, size, seed, part) for part, seed in parts_of(training)]
        validation_sources = [open_source(training, size, training.seed + 1)]
        self.data = Data(sources, validation_sources, first_cursor(sources, training))
        self.meshes = _meshes(self.resolved.dims, self._device.type)
        self._seconds = 0.0
        self.running = self._set_up()
        prepare_weights(self.trainer)

    @property
    def trainer(self) -> Trainer:
        """Of `running`."""
        return self.running.trainer

    @property
    def model(self) -> LocalModel:
        """This rank's part of the model."""
        return self.running.trainer.model

    def _set_up(self) -> RunningJob:
        # without a terminal, no progress bar
        with contextlib.redirect_stdout(None):
            job = set_up(
                self.resolved,
                self._device,
                _checkpoints(self.resolved.checkpoint_folder),
                Heartbeat(),
                Launch(),
                [],
                self.meshes,
                self.data,
                clock=lambda: self._seconds,
                make_sinks=lambda *_: SinkWriter([]),  # no file, on any rank
            )
        # other jobs follow in this process
        gc.enable()
        assert job is not None, "the job is not done"
        # a loss that isn't finite is compared as any other is, and doesn't end the case
        skips_all = BadSteps(policy="skip", budget=LAST_RESUMED_STEP)
        return dataclasses.replace(job, detector=BadStepDetector(job.device, skips_all))

    def step(self, step: int, samples: Samples) -> Record:
        """Take one optimizer step, and return its record.

        Args:
            samples: gets the hashes of this rank's.
        """
        job, data = self.running, next(self.running.loader)
        self.is_token = torch.cat([_labels(batch) for batch in data.batches]) != PADDING
        dims = self.resolved.dims
        for number, batch in enumerate(data.batches):
            first = (number * dims.dp + self.meshes.dp.get_local_rank()) * len(batch.tokens)
            read = batch.tokens, _labels(batch).flatten(1), batch.documents, batch.future_tokens
            parts = [part.flatten(1) for part in read if part is not None]
            for index, sample in enumerate(zip(*parts, strict=True), first):
                samples[step, index] = _hash(*sample)
        # the first step shows gradients as they are
        trainer = job.trainer if step > 1 else dataclasses.replace(job.trainer, max_norm=math.inf)
        batches = [batch.to(self._device) for batch in data.batches]
        with hardware.ordered_attention(job.attention):
            result = trainer.step(step, batches, job.detector)
        self._finished = FinishedStep(step, data, result)
        self._seconds += 1
        job.reporter.count(step, 0.0)
        for observer in job.observers.values():
            observer.after_step(step, data.cursor.counts)
        figures = trainer.figures_of(step, result) | data.figures
        group = trainer.optimizer.param_groups[0]
        figures["optim/lr_taken"] = group["lr"] / group[LR_SCALE]
        return job.reporter.report(step, figures)

    def validate(self) -> dict[str, float]:
        """Return the metrics of a validation, by name."""
        assert self.running.validate is not None
        evaluate = functools.partial(self.running.validate, self.model, lambda: False, _fail)
        with hardware.ordered_attention(self.running.attention):
            figures = evaluate()
            if self.trainer.average is not None:
                figures |= self.trainer.average.on_validation(evaluate, lambda: False)
        return figures

    def save(self) -> Path:
        """Save a checkpoint of the last step, and return its folder."""
        save(self.running, self._finished, is_last=True)
        return listing.step_folder(self.resolved.checkpoint_folder, self._finished.step)

    def resume(self) -> None:
        """Go on as a new job that resumes from the checkpoint.

        Raises:
            ConfigError: if it can't be loaded, on every rank.
        """
        self.close()
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                # the new job may get the same memory, and must not find its values there
                local_shard(tensor).fill_(torch.nan)
        self.running = self._set_up()
        for stage in self.model.stages:
            show_attention(stage)

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor of a checkpoint, but the state of random numbers."""
        state = self.trainer.tensors.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(RNG)}

    def close(self) -> None:
        """Stop reading ahead."""
        self.running.loader.close()


def _labels(batch: Batch) -> Tensor:
    """Return the labels of each depth, (B, 1 + k, S)."""
    labels = batch.labels.unsqueeze(1)
    return labels if batch.future_labels is None else torch.cat([labels, batch.future_labels], 1)


def _fail(error: Exception) -> None:
    raise error


def _hash(*parts: Tensor) -> str:
    data = torch.cat(parts).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
