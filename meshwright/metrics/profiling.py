"""Profiles single steps, and takes snapshots of GPU memory; each gets a summary as text."""

import pickle
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import meshwright
from meshwright.config.job_config import Profiling
from meshwright.system.hardware import GIB
from meshwright.system.log import logger

MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers; older ones are forgotten. Each takes about 1 KiB."""

LARGEST = 15
"""Rows of a summary."""

OURS = Path(meshwright.__file__).parent

LIBRARIES = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]

LIBRARIES += [Path(torch.__file__).parent]


class Profiler:
    """Traces, snapshots, or both, on a schedule and on demand.

    As a context; `step` is called once per step.

    Args:
        step: the last step that is done.
    """

    def __init__(self, config: Profiling, dump_folder: Path, rank: int, step: int) -> None:
        self._config, self._rank, self._step = config, rank, step
        self._traces_folder = dump_folder / config.save_traces_folder
        self._folder = dump_folder / config.save_memory_snapshot_folder
        self._has_gpu = torch.cuda.is_available()
        self._scheduled: torch.profiler.profile | None = None
        if config.enable_profiling:
            wait = config.profile_freq - config.profiler_warmup - config.profiler_active
            self._scheduled = self._build_traces(wait=wait, repeat=0)
        self._on_demand: torch.profiler.profile | None = None
        self._last_traced = 0
        self._records_memory = config.enable_memory_snapshot and self._has_gpu
        if config.enable_memory_snapshot and not self._records_memory:
            logger.info("profiling.enable_memory_snapshot has no effect: there is no GPU")
        self._stack = ExitStack()

    def __enter__(self) -> "Profiler":
        if self._scheduled is not None:
            self._stack.enter_context(self._scheduled)
        if self._records_memory:
            _record(True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._on_demand is not None:
            logger.warning("the job ended before the requested trace was complete")
            self._on_demand.on_trace_ready = None  # or the half of it would be written
            self._end_on_demand()
        if self._records_memory:
            if isinstance(error, torch.OutOfMemoryError):
                self._write_snapshot(f"step_{self._step + 1}_out_of_memory")
            _record(False)
        self._stack.__exit__(kind, error, trace)

    def request(self) -> None:
        """Trace the next `profiler_active` steps, after `profiler_warmup` others."""
        if self._scheduled is not None or self._on_demand is not None:
            logger.info("PROFILE ignored: profiling is already on")
            return
        config = self._config
        logger.info(
            "asked for a trace: of %d step(s) after step %d",
            config.profiler_active,
            self._step + config.profiler_warmup,
        )
        self._on_demand = self._build_traces(wait=0, repeat=1)
        self._on_demand.start()
        self._last_traced = self._step + config.profiler_warmup + config.profiler_active
        if self._has_gpu and not self._records_memory:
            _record(True)

    def step(self) -> None:
        """Note the end of a step; write traces and snapshots that are due."""
        self._step += 1
        if self._records_memory and self._step % self._config.profile_freq == 0:
            self._write_snapshot(f"step_{self._step}")
        if self._scheduled is not None:
            self._scheduled.step()
        if self._on_demand is not None:
            self._on_demand.step()
            if self._step == self._last_traced:
                if self._has_gpu:
                    self._write_snapshot(f"step_{self._step}")
                self._end_on_demand()

    def _end_on_demand(self) -> None:
        assert self._on_demand is not None
        self._on_demand.stop()
        self._on_demand = None
        if self._has_gpu and not self._records_memory:
            _record(False)

    def _build_traces(self, wait: int, repeat: int) -> torch.profiler.profile:
        """Return a Chrome trace after `wait` steps; `repeat`: how often, 0 for ever."""
        activities = {torch.profiler.ProfilerActivity.CPU}
        if self._has_gpu:
            activities.add(torch.profiler.ProfilerActivity.CUDA)
        activities &= torch.profiler.supported_activities()
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=wait,
                warmup=self._config.profiler_warmup,
                active=self._config.profiler_active,
                repeat=repeat,
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        path = self._traces_folder / f"step_{self._step}" / f"rank_{self._rank}.json"
        events = profiler.key_averages()
        place = "device" if any(event.self_device_time_total for event in events) else "cpu"
        table = events.table(sort_by=f"self_{place}_time_total", row_limit=LARGEST)
        _write("trace", path, profiler.export_chrome_trace, table)

    def _write_snapshot(self, name: str) -> None:
        path = self._folder / name / f"rank_{self._rank}.pickle"
        snapshot = torch.cuda.memory._snapshot()

        def write(path: str) -> None:
            # as torch's _dump_snapshot, which would look up the names of all frames once more
            with open(path, "wb") as file:
                pickle.dump(snapshot, file)

        _write("memory snapshot", path, write, summarize_memory(snapshot))


def summarize_memory(snapshot: Mapping[str, Any]) -> str:
    """Return the lines of code that hold the most memory.

    Args:
        snapshot: of `torch.cuda.memory._snapshot`: segments of blocks, each with its size in bytes,
            its state, and the frames that asked for it, innermost first.
    """
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    free = 0
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] != "active_allocated":
            free += block["size"]
            continue
        place = _place(block.get("frames", []))
        sizes[place] += block["size"]
        counts[place] += 1
    lines = [
        f"memory in use: {sizes.total() / GIB:.3f} GiB; reserved and free: {free / GIB:.3f} GiB",
        "by the line that asked for it:",
    ]
    lines += [
        f"{size / GIB:10.3f} GiB {counts[place]:6d} x  {place}"
        for place, size in sizes.most_common(LARGEST)
    ]
    return "\n".join(lines) + "\n"


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of Python, outside libraries if there is one."""
    lines = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in lines if _is_own(Path(frame["filename"]))]
    if not lines:
        return "unknown: allocated before recording began"
    frame = (own or lines)[0]
    return f"{frame['filename']}:{frame['line']} {frame['name']}"


def _is_own(file: Path) -> bool:
    """Return whether a file is ours or the user's. Ours may be installed among libraries."""
    return file.is_relative_to(OURS) or not any(map(file.is_relative_to, LIBRARIES))


def _record(is_on: bool) -> None:
    # private, but torch's documented way to record: docs.pytorch.org, "Understanding CUDA Memory
    # Usage"; if it goes, jobs with this key fail at their start
    if is_on:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(what: str, path: Path, write: Callable[[str], object], summary: str) -> None:
    """Write a file and its summary; warn if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".txt").write_text(summary)
        write(str(path))
    except OSError as error:
        logger.warning("%s %s cannot be written: %s", what, path, error)
    else:
        logger.info("wrote %s %s", what, path)
