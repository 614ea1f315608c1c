"""When a job saves, and what it finds when it starts."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshwright.checkpoint import commit
from meshwright.config.job_config import Checkpoint
from meshwright.errors import ConfigError
from meshwright.log import logger

PATIENCE = timedelta(hours=1)


class HasTensors(Protocol):
    """What is saved and loaded: a flat dict of tensors, DTensors among them."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class CheckpointManager:
    """Saves every so many steps, keeps the newest, loads on any number of ranks.

    Every method is collective: all ranks of the job must call it.
    """

    def __init__(self, folder: Path, config: Checkpoint) -> None:
        self._folder, self._config = folder, config
        self._is_first_rank = dist.get_rank() == 0
        # ranks wait here for others that write and delete files: longer than for a training step
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def load(self, state: HasTensors) -> dict[str, Any] | None:
        """Restore `state` in place from the checkpoint to resume from.

        Later checkpoints than that, if `load_step` names an earlier one, are set aside.

        Returns:
            The manifest that was saved with it; None if there is nothing to resume from.

        Raises:
            ConfigError: if a tensor is missing or its shape differs, or if ranks do not see the
                same checkpoints; `state` is as it was.
        """
        if not self._config.enable:
            return None
        step = commit.choose_step(self._folder, self._config.load_step)
        seen: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, step, group=self._group)
        if any(theirs != step for theirs in seen):
            raise ConfigError(
                "job.dump_folder",
                f"{self._folder}: ranks see different checkpoints there: {seen}"
                "\n  fix: put job.dump_folder on a file system that all machines share",
            )
        if step is None:
            return None
        folder = commit.step_folder(self._folder, step)
        start = time.perf_counter()
        wanted = state.state_dict()
        reader = dcp.FileSystemReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        # a rank that was not there when the checkpoint was written keeps the RNG it has
        wanted = {k: v for k, v in wanted.items() if k in saved or not k.startswith("rng.")}
        for name, tensor in wanted.items():
            theirs = tuple(getattr(saved.get(name), "size", ()))
            if name not in saved or theirs != tuple(tensor.shape):
                found = f"has shape {theirs} there" if name in saved else "is not in it"
                raise ConfigError(
                    "checkpoint.folder",
                    f"checkpoint {folder} is of another model: {name} has shape "
                    f"{tuple(tensor.shape)} here and {found}"
                    "\n  fix: use another job.dump_folder, or the model it was saved from",
                )
        dcp.load(wanted, storage_reader=reader, process_group=self._group)
        state.load_state_dict(wanted)
        if self._is_first_rank:
            for path in commit.set_aside_later(self._folder, step):
                logger.info("set aside a later checkpoint as %s", path)
        logger.info("resumed from %s in %.1f s", folder, time.perf_counter() - start)
        return commit.read_manifest(folder)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether `step` is one to save at."""
        return self._config.enable and (is_last or step % self._config.interval == 0)

    def save(self, step: int, state: HasTensors, manifest: dict[str, Any]) -> None:
        """Write a checkpoint that appears under its name only when it is complete."""
        start = time.perf_counter()
        unfinished = commit.unfinished_folder(self._folder, step)
        if self._is_first_rank:
            self._folder.mkdir(parents=True, exist_ok=True)
            commit.clean_up(self._folder)
        dist.barrier(self._group)
        dcp.save(
            state.state_dict(),
            storage_writer=dcp.FileSystemWriter(unfinished),
            process_group=self._group,
        )
        if self._is_first_rank:
            commit.publish(self._folder, step, manifest)
            commit.keep_latest(self._folder, self._config.keep_latest_k)
        dist.barrier(self._group)
        folder = commit.step_folder(self._folder, step)
        logger.info("saved %s in %.1f s", folder, time.perf_counter() - start)
