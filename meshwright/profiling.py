"""Traces of single steps."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from meshwright.config.job_config import Profiling
from meshwright.log import logger


def build_profiler(
    config: Profiling, dump_folder: Path, rank: int, resumed_step: int
) -> AbstractContextManager[torch.profiler.profile | None]:
    """A profiler to `step()` once a step, that writes a Chrome trace every `profile_freq` steps."""
    if not config.enable_profiling:
        return nullcontext()
    folder = dump_folder / config.save_traces_folder

    def write(profiler: torch.profiler.profile) -> None:
        path = folder / f"step_{resumed_step + profiler.step_num}" / f"rank_{rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            logger.warning("trace %s cannot be written: %s", path, error)
        else:
            logger.info("wrote trace %s", path)

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
