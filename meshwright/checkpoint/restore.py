"""Loads a checkpoint that has been chosen and verified."""

from collections.abc import Collection
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint import exclude
from meshwright.checkpoint.locks import being_read
from meshwright.checkpoint.on_ranks import on_every_rank
from meshwright.checkpoint.reader import SafeCheckpointReader
from meshwright.checkpoint.state import OPTIMIZER
from meshwright.errors import ConfigError, StorageError
from meshwright.file_system import read_patiently


def restore(
    folder: Path, state: dict[str, Tensor], excluded: Collection[str], group: ProcessGroup
) -> dict[str, Tensor]:
    """Fill the tensors of `state` in place from the checkpoint in `folder`. Collective over
    `group`.

    Args:
        excluded: parts to leave out, as `exclude.left_out` names them.

    Returns:
        The part of `state` that was filled.

    Raises:
        ConfigError: if the index names anything but data, or a tensor is missing or has another
            shape; `state` is then as it was.
        StorageError: on every rank, if one of them cannot read a file now.
    """
    with being_read(folder):
        opened: list[SafeCheckpointReader] = []
        on_every_rank(lambda: opened.append(_open(folder)), group)
        [reader] = opened
        saved = reader.read_metadata().state_dict_metadata
        wanted = state
        if exclude.OPTIMIZER in excluded:
            wanted = {k: v for k, v in wanted.items() if not k.startswith(OPTIMIZER)}
        # a rank that was not there when the checkpoint was written keeps the RNG it has
        wanted = {k: v for k, v in wanted.items() if k in saved or not k.startswith("rng.")}
        for name, tensor in wanted.items():
            theirs = getattr(saved.get(name), "size", None)  # an object's has none
            if theirs != tensor.shape:
                found = "is no tensor there" if name in saved else "is not in it"
                if theirs is not None:
                    found = f"has shape {tuple(theirs)} there"
                raise ConfigError(
                    "checkpoint.folder",
                    f"checkpoint {folder} is of another model: {name} has shape "
                    f"{tuple(tensor.shape)} here and {found}"
                    "\n  fix: use another job.dump_folder, or the model it was saved from",
                )
        try:
            dcp.load(wanted, storage_reader=reader, process_group=group)
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            if not isinstance(failure, OSError):
                raise
            what = f"rank {rank}: checkpoint {folder} cannot be read: {failure}"
            raise StorageError(f"{what}\n  fix: start again") from error
    return wanted


def _open(checkpoint: Path) -> SafeCheckpointReader:
    try:
        return read_patiently(checkpoint, lambda: SafeCheckpointReader(checkpoint))
    except StorageError:
        raise
    except Exception as error:  # a damaged pickle raises any exception
        raise ConfigError(
            "checkpoint.load_step",
            f"checkpoint {checkpoint} cannot be read: {error}"
            "\n  fix: name another step in checkpoint.load_step",
        ) from None
