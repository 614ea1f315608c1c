"""Verifies a checkpoint on all ranks at once, a part of its files on each."""

from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint import commit
from meshwright.checkpoint.locks import being_read
from meshwright.checkpoint.manifest import DamagedError, Manifest


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
