"""Profiles single steps, with a summary as text, and takes snapshots of GPU memory."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from meshwright.config.job_config import Profiling
from meshwright.metrics.observers import Observer
from meshwright.system.files import only_warn
from meshwright.system.log import logger

MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers; older ones are forgotten. Each takes about 1 KiB."""

LARGEST = 15
"""Rows of a summary."""


class Profiler(Observer):
    """Traces, snapshots, or both, on a schedule and on demand.

    Args:
        step: the last step that is done.
    """

    def __init__(self, config: Profiling, dump_folder: Path, rank: int, step: int) -> None:
        self._config, self._rank, self._step = config, rank, step
        self._traces_folder = dump_folder / config.save_traces_folder
        self._folder = dump_folder / config.save_memory_snapshot_folder
        self._has_gpu = torch.cuda.is_available()
        self._records_memory = config.enable_memory_snapshot and self._has_gpu
        if config.enable_memory_snapshot and not self._records_memory:
            logger.info("profiling.enable_memory_snapshot has no effect: there is no GPU")
        self._traces: torch.profiler.profile | None = None
        self._last_asked = 0
        """Last step of the trace on demand that is under way; 0: there is none."""

    def __enter__(self) -> Self:
        config = self._config
        if config.enable_profiling:
            wait = config.profile_freq - config.profiler_warmup - config.profiler_active
            self._traces = self._start(wait=wait, repeat=0)
        if self._records_memory:
            _record(True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._records_memory and isinstance(error, torch.OutOfMemoryError):
            self._write_snapshot(f"step_{self._step + 1}_out_of_memory")
        if self._traces is not None:
            if self._last_asked:
                logger.warning("the job ended before the requested trace was complete")
                self._traces.on_trace_ready = None  # or the half of it would be written
            self._traces.stop()
        if self._records_memory or (self._last_asked and self._has_gpu):
            _record(False)

    def on_trace_request(self) -> None:
        """Trace the next `profiler_active` steps, after `profiler_warmup` others."""
        if self._traces is not None:
            logger.info("PROFILE ignored: profiling is already on")
            return
        config = self._config
        begin = self._step + config.profiler_warmup
        logger.info("asked for a trace: of %d step(s) after step %d", config.profiler_active, begin)
        self._traces = self._start(wait=0, repeat=1)
        self._last_asked = begin + config.profiler_active
        if self._has_gpu and not self._records_memory:
            _record(True)

    def on_step_end(self) -> None:
        """Write traces and snapshots that are due."""
        self._step += 1
        if self._records_memory and self._step % self._config.profile_freq == 0:
            self._write_snapshot(f"step_{self._step}")
        if self._traces is None:
            return
        self._traces.step()
        if self._step == self._last_asked:
            if self._has_gpu:
                self._write_snapshot(f"step_{self._step}")
            self._traces.stop()
            self._traces, self._last_asked = None, 0
            if self._has_gpu and not self._records_memory:
                _record(False)

    def _start(self, wait: int, repeat: int) -> torch.profiler.profile:
        """Start a Chrome trace after `wait` steps; `repeat`: how often, 0 for ever."""
        activities = {torch.profiler.ProfilerActivity.CPU}
        if self._has_gpu:
            activities.add(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities & torch.profiler.supported_activities(),
            schedule=torch.profiler.schedule(
                wait=wait,
                warmup=self._config.profiler_warmup,
                active=self._config.profiler_active,
                repeat=repeat,
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )
        profile.start()
        return profile

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        gc.collect()  # the last trace's events: in cycles, and too old for the job's collections
        path = self._traces_folder / f"step_{self._step}" / f"rank_{self._rank}.json"
        events = profiler.key_averages()
        place = "device" if any(event.self_device_time_total for event in events) else "cpu"
        table = events.table(sort_by=f"self_{place}_time_total", row_limit=LARGEST)

        def write() -> None:
            path.with_suffix(".txt").write_text(table)
            profiler.export_chrome_trace(str(path))

        _write("trace", path, write)

    def _write_snapshot(self, name: str) -> None:
        path = self._folder / name / f"rank_{self._rank}.pickle"
        dump = partial(torch.cuda.memory._dump_snapshot, str(path))
        _write("memory snapshot", path, dump)


def _record(is_on: bool) -> None:
    # private, as _dump_snapshot, but torch's documented way to record: docs.pytorch.org,
    # "Understanding CUDA Memory Usage"; if it goes, jobs with this key fail at their start
    options: dict[str, Any] = {"max_entries": MOST_EVENTS} if is_on else {"enabled": None}
    torch.cuda.memory._record_memory_history(**options)


def _write(what: str, path: Path, write: Callable[[], object]) -> None:
    """Write a file; warn if that fails."""
    with only_warn("%s %s cannot be written", what, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
        logger.info("wrote %s %s", what, path)
