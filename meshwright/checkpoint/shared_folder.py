"""Whether ranks share a folder: the first leaves a file there, and the others look for it."""

import secrets
import time
from pathlib import Path

from meshwright.log import logger

SEEN_WITHIN_S = 10.0
"""Seconds that a rank looks for the file. Network file systems show a new one late."""


def leave_token(folder: Path) -> str | None:
    """Make a file in `folder`, and the folder; return its random name, or None if that fails."""
    token = f".seen-by-all-ranks-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / token).touch(exist_ok=False)
    except OSError as error:  # a full disk, say: then saves fail, too, and are reported
        logger.warning("whether all ranks share %s is not known: %s", folder, error)
        return None
    return token


def sees_token(folder: Path, token: str) -> bool:
    """Whether the file is in `folder`, or appears there in time."""
    end = time.monotonic() + SEEN_WITHIN_S
    while not (folder / token).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def remove_token(folder: Path, token: str) -> None:
    """Remove the file, and its folders if they hold nothing else, as before a job starts."""
    try:
        (folder / token).unlink(missing_ok=True)
        folder.rmdir()
        folder.parent.rmdir()
    except OSError:  # they hold checkpoints
        return
