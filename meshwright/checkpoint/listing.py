"""The names of checkpoints' folders, and which there are. Free of torch."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from meshwright.system.retries import ABSENT, read_patiently

NAME = re.compile(
    r"step-(?P<step>0|[1-9][0-9]*)"
    r"(?:\.(?P<nonce>[0-9a-f]{16})\.(?P<state>unfinished|deleted)|\.(?P<aside>aside)\d+)?"
)
"""A complete checkpoint, or one that is being written or deleted, or was set aside. The nonce says
that our job made it: a folder of a user's that ends the same way is left unchanged."""

UNFINISHED, DELETED = ".unfinished", ".deleted"

NO_NONCE = "0" * 16


class CheckpointEntry(NamedTuple):
    """A folder with the name of a checkpoint."""

    step: int
    path: Path
    state: str
    """"unfinished", "deleted" or "aside"; "": complete, unless harmed later."""
    nonce: str
    """Of the save or the deletion under way; "": none is."""


def entries(folder: Path) -> list[CheckpointEntry]:
    """Return everything in `folder` that has the name of a checkpoint, by step and name."""

    def scan() -> list[CheckpointEntry]:
        with os.scandir(folder) as listing:
            # only a link has to be looked at: the listing itself tells which others are folders
            return sorted(
                CheckpointEntry(
                    int(name["step"]),
                    Path(entry),
                    name["state"] or name["aside"] or "",
                    name["nonce"] or "",
                )
                for entry in listing
                if (name := NAME.fullmatch(entry.name))
                and (entry.is_dir(follow_symlinks=False) or Path(entry).is_dir())
            )

    try:
        return read_patiently(folder, scan)
    except ABSENT:
        return []


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order."""
    return [entry.step for entry in entries(folder) if not entry.state]


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint's folder by its name; None for any other name."""
    match = NAME.fullmatch(name)
    return int(match["step"]) if match and match.end("step") == len(name) else None


def step_folder(folder: Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` is."""
    return folder / f"step-{step}"


def unfinished_folder(folder: Path, step: int, nonce: str = NO_NONCE) -> Path:
    """Return where the checkpoint of `step` is while it is written. `nonce`: 16 hexadecimal digits
    that no other save has."""
    return folder / f"step-{step}.{nonce}{UNFINISHED}"
