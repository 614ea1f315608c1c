"""The figures of a plan that was written beside the job's output."""

import json
from pathlib import Path

from meshwright.log import logger

PLAN = "plan.json"
"""In the dump folder: the output of `meshwright plan --json`."""
GIB = 2**30


def planned_memory(dump_folder: Path, world_size: int) -> dict[str, float]:
    """Return the planned peak of tensors as a figure; empty without a plan for `world_size` ranks.

    A plan that cannot be read is said, and does not stop the job.
    """
    path = dump_folder / PLAN
    if not path.exists():
        return {}
    try:
        plan = json.loads(path.read_text())
        if plan["world_size"] != world_size:
            logger.warning("%s is for %s ranks, not %d", path, plan["world_size"], world_size)
            return {}
        return {"memory/planned_gib": plan["peak_bytes"] / GIB}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return {}
