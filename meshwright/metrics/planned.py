"""The figures of a plan that lies in the job's dump folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshwright.config.job_config import JobConfig
from meshwright.system.log import logger

PLAN = "plan.json"
"""In the dump folder: the output of `meshwright plan --json`."""

GIB = 2**30

T = TypeVar("T")


def job_identity(config: JobConfig) -> dict[str, object]:
    """Return the keys in which a job must agree with its plan: they decide its memory, and are the
    same before and after every -1 is filled in."""
    model, training, parallelism = config.model, config.training, config.parallelism
    degrees = (
        "data_parallel_replicate",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
    return {
        **{f"parallelism.{of}_degree": getattr(parallelism, f"{of}_degree") for of in degrees},
        "parallelism.fsdp_reshard_after_forward": parallelism.fsdp_reshard_after_forward,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "optimizer.early_step_in_backward": config.optimizer.early_step_in_backward,
        "model.flavor": model.flavor,
        "model.args": model.args,
        "training.seq_len": training.seq_len,
        "training.local_batch_size": training.local_batch_size,
        "activation_checkpoint.mode": config.activation_checkpoint.mode,
    }


def planned_memory(config: JobConfig, world_size: int) -> dict[str, float]:
    """Return the planned peak of tensors as a figure; empty without a plan of this job on
    `world_size` ranks.

    A plan that cannot be read, or is of another job, is a warning.
    """
    peak = _read(config, world_size, lambda plan: plan["peak_bytes"] / GIB)
    return {} if peak is None else {"memory/planned_gib": peak}


def planned_ledger(config: JobConfig, world_size: int) -> list[str]:
    """Return the planned peak by purpose, and the changes with which the job would fit, as lines.

    Empty without a plan of this job on `world_size` ranks that can be read.
    """
    return _read(config, world_size, _lines) or []


def _read(config: JobConfig, world_size: int, find: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the result of `find` for the plan; None if there is none, it cannot be read, or it is
    of another job."""
    path = Path(config.job.dump_folder) / PLAN
    try:
        if not path.exists():
            return None
        plan = json.loads(path.read_text())
        if plan["world_size"] != world_size:
            logger.warning("%s is for %s ranks, not %d", path, plan["world_size"], world_size)
            return None
        identity = job_identity(config)
        others = [key for key, value in identity.items() if plan["job"][key] != value]
        if not others:
            return find(plan)
        logger.warning("%s is of another job; different keys: %s", path, ", ".join(others))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read: %s", path, error)
    return None


def _lines(plan: dict[str, Any]) -> list[str]:
    (shown,) = (rank for rank in plan["ranks"] if rank["rank"] == plan["rank"])
    peak = shown["peak"]
    lines = [
        f"the plan ({plan['verdict']} on {plan['device']['name']}) has at the peak of rank "
        f"{shown['rank']}, in {peak['phase']} of {peak['module'] or 'the step'}:",
        *(f"  {size / GIB:8.2f} GiB {name}" for name, size in peak["by_purpose"].items() if size),
        f"  {peak['num_bytes'] / GIB:8.2f} GiB of tensors",
    ]
    fitting = [one for one in plan["remedies"] if one["verdict"] == "fits"]
    if fitting:
        lines.append("it would fit with one of these:")
        lines += [f"  {one['change']}  # {one['peak_bytes'] / GIB:.2f} GiB" for one in fitting]
    return lines
