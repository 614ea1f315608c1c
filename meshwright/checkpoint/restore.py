"""Loads a checkpoint that has been chosen and verified."""

from collections.abc import Collection
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.checkpoint import exclude
from meshwright.checkpoint.locks import being_read
from meshwright.checkpoint.reader import SafeCheckpointReader
from meshwright.checkpoint.state import OPTIMIZER
from meshwright.errors import ConfigError


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
    """
    with being_read(folder):
        reader = _open(folder)
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
        dcp.load(wanted, storage_reader=reader, process_group=group)
    return wanted


def _open(checkpoint: Path) -> SafeCheckpointReader:
    try:
        return SafeCheckpointReader(checkpoint)
    except Exception as error:  # a damaged pickle raises any exception
        raise ConfigError(
            "checkpoint.load_step",
            f"checkpoint {checkpoint} cannot be read: {error}"
            "\n  fix: name another step in checkpoint.load_step",
        ) from None
