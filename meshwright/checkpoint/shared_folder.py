"""Whether ranks share a folder: the first leaves a file there, and the others look for it."""

import secrets
import socket
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.on_ranks import on_first_rank
from meshwright.errors import ConfigError, in_ranges
from meshwright.log import logger

SEEN_WITHIN_S = 10.0
"""Seconds that a rank looks for the file. Network file systems show a new one late."""


def check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Check that all ranks see the same files in `folder`.

    Collective: every rank of `group`, which is the whole job, must call it.

    Raises:
        ConfigError: on every rank, if one does not see the first rank's file.
    """
    file = on_first_rank(partial(_make_file, folder), group)
    if file is None:
        return
    mine = (_is_seen(folder / file), socket.gethostname())
    seen = [mine] * dist.get_world_size()
    dist.all_gather_object(seen, mine, group=group)
    if dist.get_rank() == 0:
        _remove_file(folder / file)
    blind = [rank for rank, (sees, _) in enumerate(seen) if not sees]
    hosts = ", ".join(sorted({seen[rank][1] for rank in blind}))
    if blind:
        raise ConfigError(
            "job.dump_folder",
            f"job.dump_folder: rank {in_ranges(blind)} (on {hosts}) does not see what rank 0 "
            f"(on {seen[0][1]}) writes to {folder}"
            "\n  fix: put job.dump_folder on a file system that all machines share",
        )


def _make_file(folder: Path) -> str | None:
    """Make a file in `folder`, and the folder; return its random name, or None if that fails."""
    name = f".seen-by-all-ranks-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(exist_ok=False)
    except OSError as error:  # a full disk, say: then saves fail, too, and are reported
        logger.warning("whether all ranks share %s is not known: %s", folder, error)
        return None
    return name


def _is_seen(file: Path) -> bool:
    """Return whether the file is there, or appears in time."""
    end = time.monotonic() + SEEN_WITHIN_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _remove_file(file: Path) -> None:
    """Remove the file, and its folders if they hold nothing else, as before a job starts."""
    try:
        file.unlink(missing_ok=True)
        file.parent.rmdir()
        file.parent.parent.rmdir()
    except OSError:  # they hold checkpoints
        return
