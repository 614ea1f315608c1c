"""Ends a job that a scheduler starts again and again without progress."""

from collections.abc import Mapping
from pathlib import Path

from meshwright.metrics.report.run import rows_of
from meshwright.metrics.sinks import HISTORY
from meshwright.system import slurm
from meshwright.system.errors import ConfigError

MAX_RESTARTS = 3
"""Restarts in a row without a new checkpoint, after which a job ends."""


def check_progress(folder: Path, resume_step: int, env: Mapping[str, str]) -> None:
    """Check that one of the last restarts by Slurm has saved a checkpoint.

    All nodes read the same history, to which only running ranks write, so all of them agree.

    Args:
        folder: the job's dump folder.
        resume_step: step of the newest checkpoint, at which this start resumes; 0: none.

    Raises:
        ConfigError: if the last `MAX_RESTARTS` restarts haven't: the next one wouldn't, either.
    """
    restart = slurm.restarts(env)
    if restart < MAX_RESTARTS:
        return
    # starts of this job that trained on to a later checkpoint; the first one is number 0
    job = slurm.job_name(env)
    facts = [(row["step"], row["slurm"]) for row in rows_of(folder / HISTORY) if "slurm" in row]
    useful = [own["restart"] for step, own in facts if own["job"] == job and step < resume_step]
    idle = restart - 1 - max(useful, default=-1)
    if idle >= MAX_RESTARTS:
        raise ConfigError(
            "",
            f"Slurm has started this job {restart} times again, and the last {idle} starts saved "
            f"no checkpoint after step {resume_step}\n"
            f"  fix: read the ends of the earlier starts in {folder / HISTORY} and the console; "
            "raise --time if it is too short for a step and a save; then submit the job again",
        )
