"""A decision of the first rank for all, and a verification that all ranks share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint import commit
from meshwright.checkpoint.locks import being_read
from meshwright.checkpoint.manifest import DamagedError, Manifest
from meshwright.errors import ConfigError, StorageError

T = TypeVar("T")


def on_first_rank(find: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `find` on the first rank alone; return its result on every rank.

    Collective: every rank of `group`, which is the whole job, must call it.

    Raises:
        ConfigError, StorageError: on every rank, if `find` does.
    """
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except (ConfigError, StorageError) as error:
            told = [error]
    dist.broadcast_object_list(told, src=0, group=group)
    if isinstance(told[0], ConfigError | StorageError):
        raise told[0]
    return told[0]


def verify_on_ranks(checkpoint: Path, manifest: Manifest, group: dist.ProcessGroup) -> str:
    """Read every byte that `manifest` names; return the damage, or "", the same on every rank.

    Collective: every rank of `group`, which is the whole job, must call it.

    Args:
        group: its timeout has to be long enough for a rank's part of the files.

    Raises:
        StorageError: on every rank, if one of them cannot read its part now.
    """
    names = sorted(manifest["files"])
    mine = names[dist.get_rank() :: dist.get_world_size()]

    def verify() -> list[str]:
        try:
            with being_read(checkpoint):
                return commit.verify(checkpoint, manifest, mine)
        except DamagedError as error:  # the first rank has seen it: deleted, or not shown here yet
            fix = "run the same command again"
            raise StorageError(f"{checkpoint}: {error.what}\n  fix: {fix}") from None

    found = on_every_rank(verify, group)
    return "; ".join(what for of_rank in found for what in of_rank)


def on_every_rank(find: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Call `find` on every rank; return all results, by rank. Collective, as `on_first_rank`.

    Raises:
        ConfigError, StorageError: on every rank, if `find` does on one.
    """
    here: T | ConfigError | StorageError
    try:
        here = find()
    except (ConfigError, StorageError) as error:
        here = error
    gathered = [here] * dist.get_world_size()
    dist.all_gather_object(gathered, here, group=group)
    found: list[T] = []
    for rank, of_rank in enumerate(gathered):
        if isinstance(of_rank, ConfigError):
            raise of_rank
        if isinstance(of_rank, StorageError):
            raise StorageError(f"rank {rank}: {of_rank}")
        found.append(of_rank)
    return found
