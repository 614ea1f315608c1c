"""Which checkpoints a folder holds, and how one comes to be there: all at once, or not at all.

Free of torch, so that a resume is checked before any rank starts.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, check

MANIFEST = "checkpoint.json"
STEP_FOLDER = re.compile(r"step-(\d+)")
UNFINISHED = ".unfinished"
DELETED = ".deleted"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, in order."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.parent.name) for path in folder.glob(f"*/{MANIFEST}"))
    return sorted(int(name[1]) for name in names if name)


def choose_step(folder: Path, load_step: int) -> int | None:
    """The step to resume from: `load_step`, or with -1 the newest; None if there is none.

    Raises:
        ConfigError: if `load_step` is not there.
    """
    steps = saved_steps(folder)
    if load_step == -1:
        return steps[-1] if steps else None
    there = ", ".join(map(str, steps)) or "none"
    check(
        load_step in steps,
        "checkpoint.load_step",
        load_step,
        f"not among the checkpoints in {folder}: {there}",
        "name one of them, or -1 for the newest",
    )
    return load_step


def step_folder(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` is."""
    return folder / f"step-{step}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is while it is written; never taken for a checkpoint."""
    return folder / f"step-{step}{UNFINISHED}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What `publish` wrote.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "checkpoint.load_step",
            f"{checkpoint / MANIFEST}: cannot be read: {error}"
            "\n  fix: name another step in checkpoint.load_step, or remove this one",
        ) from None
    return manifest


def publish(folder: Path, step: int, manifest: dict[str, Any]) -> None:
    """Turn the unfinished checkpoint of `step`, whose tensors are on disk, into a complete one.

    Its one rename is atomic (POSIX rename); everything before is flushed to the disk first, so
    neither a kill nor a power cut leaves a partial checkpoint under a complete one's name.
    """
    unfinished, final = unfinished_folder(folder, step), step_folder(folder, step)
    with open(unfinished / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    if final.exists():  # not of this run, which has set aside what it does not continue
        _set_aside(final)
    unfinished.rename(final)
    _sync_folder(folder)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that they count no longer; returns their new names.

    They belong to a run that is not continued: kept among those of the run that is, they would be
    taken for its newest.
    """
    return [_set_aside(step_folder(folder, later)) for later in saved_steps(folder) if later > step]


def _set_aside(checkpoint: Path) -> Path:
    number = len(list(checkpoint.parent.glob(f"{checkpoint.name}.aside*")))
    return checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.aside{number}"))


def clean_up(folder: Path) -> None:
    """Remove what killed saves and deletions have left."""
    for path in (*folder.glob(f"*{UNFINISHED}"), *folder.glob(f"*{DELETED}")):
        shutil.rmtree(path)


def keep_latest(folder: Path, count: int) -> None:
    """Delete all but the newest `count` checkpoints; 0 keeps all."""
    for step in saved_steps(folder)[:-count] if count else []:
        _delete(step_folder(folder, step))


def _delete(checkpoint: Path) -> None:
    """Remove a checkpoint; if killed meanwhile, what is left no longer counts as one."""
    doomed = checkpoint.rename(checkpoint.with_name(checkpoint.name + DELETED))
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
