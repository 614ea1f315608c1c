"""The weighted mean of several checkpoints' weights, tensor by tensor."""

import secrets
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint import listing
from meshwright.checkpoint.index import SavedTensor
from meshwright.checkpoint.reader import CHUNK, CheckpointWeights
from meshwright.checkpoint.store import Saved
from meshwright.checkpoint.writer import write
from meshwright.system.errors import config_error


def _add(share: float, total: Tensor, part: Tensor) -> None:
    """Add `part` times `share` to `total`; all of it in fp64 would be a third tensor."""
    rows = max(1, CHUNK // max(1, part[:1].numel() if part.dim() else 1))
    sums, parts = (torch.atleast_1d(tensor).split(rows) for tensor in (total, part))
    for some, added in zip(sums, parts, strict=True):
        some.add_(added.double() * share)


def merge(
    parts: Sequence[Saved],
    shares: Sequence[float],
    tensors: Mapping[str, SavedTensor],
    folder: Path,
) -> Path:
    """Write a checkpoint of the sums of `parts` times `shares`, of their weights only.

    Added up in fp64 in the order of `parts` and rounded once, so the mesh of each doesn't show. It
    holds a tensor in fp64 and one more at a time. Tensors of integers are the last part's: the
    expert load count one step's tokens, and a mean of counts is the count of no step.

    Args:
        parts: of one model.
        tensors: to merge, by name, each the same in all parts.
        folder: where the step's folder is made: of the last part's step.

    Returns:
        the step's folder.

    Raises:
        ConfigError: if a part can't be read, or the merge not be written; nothing of it is left.
    """
    manifest, steps = parts[-1].manifest, [part.manifest["step"] for part in parts]
    facts = {key: value for key, value in manifest.items() if key not in ("files", "crc32")}
    facts |= {"loss": None, "best_validation": None, "model_only": True}
    facts["merged"] = {"steps": steps, "weights": [*shares]}
    like = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for name, tensor in tensors.items()
    }
    weights = [CheckpointWeights(part.place, saved_name=str) for part in parts]
    last = torch.empty(0)

    def mean_of(name: str) -> Tensor:
        nonlocal last
        # it is written by now, but torch's writer keeps every tensor until the end (2.13)
        last.untyped_storage().resize_(0)
        if not like[name].is_floating_point():
            last = weights[-1].read(name)
            return last
        total = torch.zeros(like[name].shape, dtype=torch.float64)
        for part, share in zip(weights, shares, strict=True):
            part.load({name: total}, put=partial(_add, share))
        last = total.to(like[name].dtype, copy=True)
        return last

    unfinished = listing.unfinished_folder(folder, steps[-1], secrets.token_hex(8))
    try:
        with warnings.catch_warnings():  # that there is but one process
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            write(like, unfinished, facts, mean_of, None)
    except CheckpointException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # it holds merges of other steps
            folder.rmdir()
        _, (failure, _) = error.failures.popitem()
        if not isinstance(failure, OSError):
            raise failure from None
        rule = f"cannot be written: {failure.strerror or failure}"
        raise config_error("--out", str(folder), rule, "choose a different folder") from None
    return listing.step_folder(folder, steps[-1])
