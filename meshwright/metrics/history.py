"""`history.jsonl` in the dump folder: when each process of the job began and ended, and where."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.log import logger

FILE = "history.jsonl"


def note(folder: Path, step: int, event: str, facts: Mapping[str, Any]) -> None:
    """Append an event. A job that starts over, at step 0, begins a new file.

    Args:
        event: "start" or "end".
        facts: anything that JSON can hold.
    """
    line = json.dumps({"event": event, "step": step, "unix_s": round(time.time(), 1), **facts})
    is_new = event == "start" and step == 0
    try:
        with open(folder / FILE, "w" if is_new else "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:  # a full disk, say
        logger.warning("%s cannot be written: %s; training continues", folder / FILE, error)
