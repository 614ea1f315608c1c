"""How a checkpoint appears complete or not at all. Free of torch."""

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.checkpoint import lease
from meshwright.checkpoint.listing import NAME, step_folder
from meshwright.checkpoint.manifest import MANIFEST, VERSION, FileRecord, to_json
from meshwright.system.files import sync_file, sync_folder
from meshwright.system.log import logger


def publish(unfinished: Path, manifest: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Turn an unfinished checkpoint, whose `files` are on disk, into a complete one.

    Its one rename is atomic (POSIX rename); everything before is flushed to the disk first, so
    neither a kill nor a power cut leaves a partial checkpoint under a complete one's name.

    Raises:
        TakenOverError: if another job writes to the folder by now.
    """
    name = NAME.fullmatch(unfinished.name)
    assert name is not None, unfinished
    final = step_folder(unfinished.parent, int(name["step"]))
    content = {"version": VERSION, **manifest, "files": dict(sorted(files.items()))}
    with open(unfinished / MANIFEST, "wb") as file:
        file.write(to_json(content))
        file.flush()
        sync_file(file.fileno(), unfinished / MANIFEST)
    sync_folder(unfinished)
    lease.check_lease(unfinished.parent, name["nonce"])
    if os.path.lexists(final):  # not of this run, which has set aside later checkpoints
        logger.warning("%s was there already; it is now %s", final, set_aside(final).name)
    unfinished.rename(final)
    sync_folder(unfinished.parent)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, or a path named like one, so that it counts no longer; return where it
    is."""
    names = (path.with_name(f"{path.name}.aside{number}") for number in count())
    free = next(name for name in names if not os.path.lexists(name))
    return path.rename(free)
