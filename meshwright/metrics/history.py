"""The history of a run: a line for each start and end of its processes, in history.jsonl."""

import itertools
import json
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from meshwright.metrics.sinks import WholeRecords
from meshwright.system.files import only_warn
from meshwright.system.log import logger

FILE = "history.jsonl"

Event = Literal["start", "end"]

OF_A_RUN = ["metrics.jsonl", FILE, "samples.jsonl", "skipped_steps.jsonl", "experts.json"]
OF_A_RUN += ["config.toml"]
"""Files in the dump folder that a job which starts over begins again."""


def set_aside(folder: Path) -> None:
    """Move the files of an earlier run in `folder` to a folder of their own in it; nothing if that
    run has logged no step."""
    metrics = folder / OF_A_RUN[0]
    with only_warn("the earlier run in %s cannot be set aside", folder):
        if not (metrics.exists() and metrics.stat().st_size):
            return
        numbers = (folder / f"earlier_run_{number}" for number in itertools.count(1))
        earlier = next(path for path in numbers if not path.exists())
        earlier.mkdir()
        for name in OF_A_RUN:
            if (folder / name).exists():
                (folder / name).rename(earlier / name)
        logger.info("the earlier run's metrics are now in %s", earlier)


def note(folder: Path, step: int, event: Event, facts: Mapping[str, Any]) -> None:
    """Append an event, with facts for JSON. A job that starts over at step 0 begins a new file."""
    line = json.dumps({"event": event, "step": step, "unix_s": round(time.time(), 1), **facts})
    try:
        if event == "start" and step == 0:
            (folder / FILE).unlink(missing_ok=True)
        with closing(WholeRecords(folder / FILE)) as file:
            file.append(line.encode() + b"\n")
    except OSError as error:  # a full disk, say
        logger.warning("%s cannot be written: %s; training continues", folder / FILE, error)


def note_missing_end(folder: Path, step: int, reason: str, since: float) -> None:
    """Append the end of a process that was killed before it could do so itself.

    Args:
        step: the step that it was in.
        since: seconds of the epoch; a start that is older is another process's.
    """
    try:
        *_, last = (folder / FILE).read_text("utf-8").splitlines()
        row = json.loads(last)
        is_open = row["event"] == "start" and row["unix_s"] >= round(since, 1)
    except (OSError, ValueError, KeyError):  # no process has noted its start
        return
    if is_open:
        note(folder, step, "end", {"reason": reason})
