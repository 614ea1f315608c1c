"""Slurm's facts about this process's job: name, nodes, tasks and restarts. Free of torch."""

import subprocess
from collections.abc import Mapping

from meshwright.system.errors import ConfigError
from meshwright.system.log import logger

SCONTROL_S = 5.0
"""Seconds that `scontrol` gets to list the nodes of a job."""

SUBMIT = "CONFIG_FILE=job.toml sbatch --nodes={nodes} multinode_trainer.slurm"


def job_name(env: Mapping[str, str]) -> str:
    """Return the job's number as `squeue` prints it, for example "22" or "21_0" of an array; ""
    outside of Slurm."""
    array, task = (env.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID", "")


def node_names(env: Mapping[str, str]) -> list[str]:
    """Return the names of the job's nodes in Slurm's order; none outside of Slurm."""
    command = ["scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")]
    if not command[-1]:
        return []
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split()


def restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm has put this job back into the queue."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def check_tasks(nodes: int | None, env: Mapping[str, str]) -> None:
    """Check that Slurm starts this command once per node of the run.

    Args:
        nodes: of the run, as the user has given it; None: not given, so the run has one.

    Raises:
        ConfigError: if srun starts the command more often, because each start would train the full
            run; or if the job has more nodes than the run, because the others would be idle.
    """
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or 1)
    if tasks > (nodes or 1):
        step_nodes = env.get("SLURM_STEP_NUM_NODES", "1")
        raise ConfigError(
            "",
            f"srun has started this command {tasks} times, and each would train the full run\n"
            f"  fix: {SUBMIT.format(nodes=step_nodes)}, or the commands of docs/clusters.md, Slurm",
        )
    allocated = int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_JOB_NUM_NODES") or 1)
    if nodes is None and allocated > 1:
        raise ConfigError(
            "",
            f"this Slurm job has {allocated} nodes, and the command would train on one of them\n"
            f"  fix: {SUBMIT.format(nodes=allocated)}; or --nnodes 1, to leave the others idle",
        )


def warn_of_usr1(env: Mapping[str, str]) -> None:
    """Warn if Slurm's usual signal before the time limit would end a torchrun that starts this
    rank: it dies of SIGUSR1 at once, and Slurm kills the ranks before they can save."""
    handled = env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    if job_name(env) and handled and "SIGUSR1" not in handled.split(","):
        logger.warning(
            "torchrun dies of SIGUSR1 (sbatch --signal), and nothing is saved\n"
            "  fix: torchrun --signals-to-handle %s,SIGUSR1, or sbatch multinode_trainer.slurm",
            handled,
        )
