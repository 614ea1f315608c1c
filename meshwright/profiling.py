"""Traces of single steps, and snapshots of GPU memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType

import torch

from meshwright.config.job_config import Profiling
from meshwright.log import logger

MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers; older ones are forgotten. Each takes about 1 KiB."""


class Profiler:
    """Traces, snapshots, or both, as a context; `step` is called once a step.

    Args:
        step: the last step that is done.
    """

    def __init__(self, config: Profiling, dump_folder: Path, rank: int, step: int) -> None:
        self._config, self._rank, self._step = config, rank, step
        self._folder = dump_folder / config.save_memory_snapshot_folder
        self._traces = None
        if config.enable_profiling:
            self._traces = _build_traces(config, dump_folder, rank, step)
        self._records_memory = config.enable_memory_snapshot and torch.cuda.is_available()
        if config.enable_memory_snapshot and not self._records_memory:
            logger.info("profiling.enable_memory_snapshot has no effect: there is no GPU")
        self._stack = ExitStack()

    def __enter__(self) -> "Profiler":
        if self._traces is not None:
            self._stack.enter_context(self._traces)
        if self._records_memory:
            # private, but torch's documented way to record: docs.pytorch.org, "Understanding CUDA
            # Memory Usage"; if it goes, jobs with this key fail at their start
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._records_memory:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"step_{self._step + 1}_out_of_memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        self._stack.__exit__(kind, error, trace)

    def step(self) -> None:
        """Note the end of a step; write what is due."""
        self._step += 1
        if self._records_memory and self._step % self._config.profile_freq == 0:
            self._write_snapshot(f"step_{self._step}")
        if self._traces is not None:
            self._traces.step()

    def _write_snapshot(self, name: str) -> None:
        path = self._folder / name / f"rank_{self._rank}.pickle"

        def write() -> None:
            torch.cuda.memory._dump_snapshot(str(path))

        _write(path, write, "memory snapshot")


def build_profiler(
    config: Profiling, dump_folder: Path, rank: int, resumed_step: int
) -> AbstractContextManager[Profiler | None]:
    """A profiler to `step()` once a step; None if the config asks for none."""
    if not (config.enable_profiling or config.enable_memory_snapshot):
        return nullcontext()
    return Profiler(config, dump_folder, rank, resumed_step)


def _build_traces(
    config: Profiling, dump_folder: Path, rank: int, resumed_step: int
) -> torch.profiler.profile:
    """A Chrome trace every `profile_freq` steps."""
    folder = dump_folder / config.save_traces_folder

    def write(profiler: torch.profiler.profile) -> None:
        path = folder / f"step_{resumed_step + profiler.step_num}" / f"rank_{rank}.json"
        _write(path, lambda: profiler.export_chrome_trace(str(path)), "trace")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=wait, warmup=config.profiler_warmup, active=config.profiler_active
        ),
        on_trace_ready=write,
        record_shapes=True,
    )


def _write(path: Path, write: Callable[[], object], what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        logger.warning("%s %s cannot be written: %s", what, path, error)
    else:
        logger.info("wrote %s %s", what, path)
