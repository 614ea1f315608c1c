"""Saves and loads the checkpoints of a job: the one class that the job talks to."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import listing
from meshwright.checkpoint.lease import JobLease, TakenOverError, check_shared, new_nonce
from meshwright.checkpoint.manifest import excluded_parts
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.checkpoint.retention import Retention, set_aside_later
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.store import Saved, of_job, open_checkpoint
from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import ConfigError, SaveError
from meshwright.system.log import logger

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

    from meshwright.checkpoint.state import ModelTensors, TrainingTensors

CHECKPOINT_TIMEOUT = timedelta(hours=1)


class CheckpointManager:
    """Saves checkpoints, keeps the newest, and loads them on any number of ranks.

    Methods are collective, `guard` and `release` apart: all ranks of the job must call them. As a
    context it ends when the checkpoint that is being written has been.
    """

    def __init__(self, folder: Path, config: Checkpoint) -> None:
        self._folder, self._config = folder, config
        self._is_first_rank = dist.get_rank() == 0
        # ranks wait here for others that write and delete files: longer than for a training step
        self.ranks = AllRanks(dist.new_group(backend="gloo", timeout=CHECKPOINT_TIMEOUT))
        """One save after the other uses their group, in the background."""
        self._lease = JobLease(folder)
        self._nonce, self._saves = self.ranks.on_first(new_nonce), 0
        self._safe_step: int | None = None
        self._retention = Retention(
            folder, config.keep_latest_k, config.keep_every_n_steps, config.keep_best
        )
        self._staging = None
        if config.saves and config.async_mode != "disabled":
            self._staging = Staging()
            # one thread for all saves: no two of them are ever under way
            self._writing = ThreadPoolExecutor(1, "checkpoint", *_on_this_device())
            self._in_flight: Future[None] | None = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._wait()
            self._retention.wait()
            if kind is None:  # the first rank may delete for longer than a step may take
                dist.barrier(group=self.ranks.group)
        except Exception as error:
            if kind is None:
                raise
            logger.error("%s", error)  # the exception that ended the job is raised on
        finally:
            self.release()

    def take_lease(self) -> None:
        """Make this job the only one of the folder, until `release`; and start to remove the
        leftovers of killed saves.

        Raises:
            ConfigError: on every rank, if another job uses it, or ranks don't share it.
        """
        nonce = self.ranks.on_first(self._take_lease)
        self._nonce = nonce or self._nonce
        if nonce and self._config.saves and dist.get_world_size() > 1:
            try:
                check_shared(self._folder, nonce, self.ranks)
            except ConfigError:
                self.release()
                raise

    def _take_lease(self) -> str:
        """Return the nonce of the lease; "": it couldn't be taken."""
        try:
            self._lease.take()
            if self._config.saves:
                self._retention.clean_up()
            return self._lease.nonce
        except OSError as error:  # saves will say so, if they fail too
            words = "%s could not be leased, so another job may use it too: %s"
            logger.warning(words, self._folder, error)
            return ""

    def release(self) -> None:
        """Let other jobs write to the folder."""
        self._lease.give_back()

    def open(self) -> AbstractContextManager[Saved | None]:
        """Give the checkpoint to resume from, verified as `checkpoint.verify` says, or None if
        there is none. Passes over damaged ones. No retention deletes it meanwhile.

        Raises:
            ConfigError: if the one that `load_step` names is damaged, or all are.
        """
        place, candidates = self.ranks.on_first(partial(of_job, self._folder, self._config))
        if not candidates:
            return nullcontext()
        names: list[str] | None = None if self._config.verify == "full" else []
        return open_checkpoint(
            place, logger.warning, names, candidates=candidates, readers=self.ranks
        )

    def load(self, state: "TrainingTensors", saved: Saved) -> None:
        """Restore `state` in place from `saved`, which `open` gives, but for the parts that
        `exclude_from_loading` names; set aside later checkpoints.

        Raises:
            ConfigError: if a tensor is missing, has a different shape, or is damaged; or if a later
                checkpoint can't be set aside.
        """
        from meshwright.checkpoint.reader import restore

        self._safe_step = step = saved.manifest["step"]
        folder, start = saved.place.path, time.perf_counter()
        excluded = excluded_parts(self._config, saved.manifest)
        wanted = restore(folder, state.state_dict(), excluded, self.ranks)
        state.load_state_dict(wanted)
        if not self._config.load_only:
            is_named = self._config.load_step != -1
            self.ranks.on_first(partial(set_aside_later, self._folder, step, is_named=is_named))
        if self._is_first_rank:
            for part in excluded:
                logger.warning("%s is left out: checkpoint.exclude_from_loading", part)
            for part in {*self._config.exclude_from_loading} - excluded:
                logger.info("%s was left out once, and is loaded now", part)
        rewind_to = self._config.rewind_to
        if rewind_to != -1 and step > rewind_to:
            words = "checkpoint.rewind_to = %d: this run went back already, and continues"
            logger.info(words, rewind_to)
        logger.info("resumed from %s in %.1f s", folder, time.perf_counter() - start)

    def prepare_saves(self, state: "TrainingTensors") -> None:
        """Import the modules that saves need (later, other versions may have been installed), and
        start to preallocate the host memory that async saves copy into.

        Call after the first step, when the optimizer has state; otherwise the first save does both.
        """
        import_module("meshwright.checkpoint.writer")
        if self._staging is not None:
            self._wait()
            self._in_flight = self._writing.submit(self._staging.preallocate, state.state_dict())

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer` update nothing on the device that a save is still copying."""
        staging = self._staging
        if staging is not None:
            optimizer.register_step_pre_hook(lambda *_: staging.hold_update())

    def save(
        self,
        step: int,
        state: "TrainingTensors | ModelTensors",
        manifest: Mapping[str, Any],
        is_last: bool,
    ) -> None:
        """Write a checkpoint; it gets its name only when it is complete.

        With an `async_mode`, first wait for the previous save, then copy the tensors and return. A
        write error is raised by the next `save` or `poll`.

        Raises:
            SaveError: on every rank, if it couldn't be written, and it is the last or
                `on_save_failure` says so; else that is a warning.
        """
        if self._staging is None:
            self._write(step, state.state_dict(), self._next_folder(step), manifest, is_last)
            return
        self._wait()
        unfinished = self._next_folder(step)
        start = time.perf_counter()
        tensors = state.state_dict()
        self._staging.take(tensors)
        write = partial(self._write, step, tensors, unfinished, manifest, is_last)
        self._in_flight = self._writing.submit(write)
        seconds = time.perf_counter() - start
        logger.info("checkpoint of step %d: copied in %.2f s, now being written", step, seconds)

    def _next_folder(self, step: int) -> Path:
        """Return where to write a checkpoint; a name that no other save has."""
        self._saves = (self._saves + 1) % 0x10000  # names have four digits for it
        self._retention.nonce = f"{self._nonce}{self._saves:04x}"
        return listing.unfinished_folder(self._folder, step, self._retention.nonce)

    def poll(self) -> None:
        """Raise the error of a finished background save, if any; doesn't wait."""
        if self._staging is not None and self._in_flight is not None and self._in_flight.done():
            done, self._in_flight = self._in_flight, None
            done.result()

    def _wait(self) -> None:
        """Wait for the background save, and raise its error, if any."""
        if self._staging is None or self._in_flight is None:
            return
        if not self._in_flight.done():
            start = time.perf_counter()
            wait([self._in_flight])
            seconds = time.perf_counter() - start
            logger.info("waited %.1f s for the previous checkpoint", seconds)
        self.poll()

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        unfinished: Path,
        manifest: Mapping[str, Any],
        is_last: bool,
    ) -> None:
        """Write `tensors`, or their staged copies. Nothing else may use the process group
        meanwhile."""
        from torch.distributed.checkpoint.api import CheckpointException

        from meshwright.checkpoint.writer import write

        start = time.perf_counter()
        if self._is_first_rank and self._safe_step is not None and not os.path.exists(self._folder):
            words = "%s is gone, and is made again: is its file system still mounted?"
            logger.warning(words, self._folder)
        try:
            copies = None
            if self._staging is not None:
                self._staging.wait()
                copies = self._staging.tensors.__getitem__
            write(tensors, unfinished, manifest, copies, self.ranks.group)
        except CheckpointException as error:
            self._give_up(step, error, is_last)
            return
        self._safe_step, folder = step, listing.step_folder(self._folder, step)
        logger.info("saved %s in %.1f s", folder, time.perf_counter() - start)
        if self._is_first_rank:
            self._retention.apply()

    def _give_up(self, step: int, error: "CheckpointException", is_last: bool) -> None:
        """Clean up after a failed save, and warn or raise; every rank knows each rank's error."""
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        if not all(isinstance(failure, OSError) for failure in failures.values()):
            raise RuntimeError(f"saving step {step}") from error
        if self._is_first_rank:
            self._retention.nonce = ""
            self._retention.clean_up(self._nonce)  # another job may have the folder by now
        rank, failure = min(failures.items())
        safe = "no checkpoint" if self._safe_step is None else f"step {self._safe_step}"
        what = f"the checkpoint of step {step} could not be written: rank {rank}: {failure}"
        what += f"; the newest that is safe: {safe}"
        if any(isinstance(failure, TakenOverError) for failure in failures.values()):
            raise SaveError(f"{what}. This job ends: the other continues")
        if is_last:
            raise SaveError(f"{what}; it was the last of the job. Make room, and start it again")
        if self._config.on_save_failure == "stop":
            raise SaveError(f'{what} (checkpoint.on_save_failure = "stop")')
        logger.warning("%s; training continues", what)


def _on_this_device() -> tuple[Callable[[int], None], tuple[int]] | tuple[()]:
    """Return a function, with its arguments, that moves a new thread from the first device to this
    one."""
    if not torch.accelerator.is_available():
        return ()
    return torch.accelerator.set_device_index, (torch.accelerator.current_device_index(),)
