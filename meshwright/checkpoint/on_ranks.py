"""A decision of the first rank for all, and a verification that all ranks share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint import commit
from meshwright.checkpoint.locks import being_read
from meshwright.checkpoint.manifest import DamagedError, Manifest
from meshwright.errors import ConfigError

T = TypeVar("T")


def on_first_rank(find: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `find` on the first rank alone; return its result on every rank.

    Collective: every rank of `group`, which is the whole job, must call it.

    Raises:
        ConfigError: on every rank, if `find` does.
    """
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [find()]
        except ConfigError as error:
            told = [error]
    dist.broadcast_object_list(told, src=0, group=group)
    if isinstance(told[0], ConfigError):
        raise told[0]
    return told[0]


def verify_on_ranks(checkpoint: Path, manifest: Manifest, group: dist.ProcessGroup) -> str:
    """Read every byte that `manifest` names; return the damage, or "", the same on every rank.

    Collective: every rank of `group`, which is the whole job, must call it.

    Args:
        group: its timeout has to be long enough for a rank's part of the files.
    """
    names = sorted(manifest["files"])
    mine = names[dist.get_rank() :: dist.get_world_size()]
    wrong: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    try:
        with being_read(checkpoint):
            wrong_here = commit.verify(checkpoint, manifest, mine)
    except DamagedError as error:  # deleted meanwhile, or not there on this machine
        wrong_here = [error.what]
    dist.all_gather_object(wrong, wrong_here, group=group)
    return "; ".join(what for of_rank in wrong for what in of_rank)
