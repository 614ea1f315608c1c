"""The figures of a plan that was written beside the job's output."""

import json
from pathlib import Path
from typing import Any

from meshwright.log import logger

PLAN = "plan.json"
"""In the dump folder: the output of `meshwright plan --json`."""
GIB = 2**30


def planned_memory(dump_folder: Path, world_size: int) -> dict[str, float]:
    """Return the planned peak of tensors as a figure; empty without a plan for `world_size` ranks.

    A plan that cannot be read is said, and does not stop the job.
    """
    try:
        plan = _read(dump_folder, world_size)
        return {"memory/planned_gib": plan["peak_bytes"] / GIB} if plan else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read: %s", dump_folder / PLAN, error)
        return {}


def planned_ledger(dump_folder: Path, world_size: int) -> list[str]:
    """Return the planned peak by purpose, and the changes with which the job would fit, as lines.

    Empty without a plan for `world_size` ranks that can be read.
    """
    try:
        plan = _read(dump_folder, world_size)
        return _lines(plan) if plan else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read: %s", dump_folder / PLAN, error)
        return []


def _read(dump_folder: Path, world_size: int) -> dict[str, Any]:
    path = dump_folder / PLAN
    if not path.exists():
        return {}
    plan: dict[str, Any] = json.loads(path.read_text())
    if plan["world_size"] != world_size:
        logger.warning("%s is for %s ranks, not %d", path, plan["world_size"], world_size)
        return {}
    return plan


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
