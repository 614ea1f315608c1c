"""A checkpoint of a small job, compared with the saved state, and resumed from."""

import dataclasses
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import commit
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.place import Place
from meshwright.checkpoint.reader import SafeCheckpointReader
from meshwright.checkpoint.weights import CheckpointWeights
from meshwright.config.job_config import Checkpoint
from meshwright.datasets.loader import whole_cursor
from meshwright.datasets.opening import OpenSource
from meshwright.datasets.sample_stream import Cursor
from meshwright.models.initialize import local_box
from meshwright.parallelisms.meshes import Meshes
from meshwright.preflight import Plan
from meshwright.proof.job import Job, show_attention

NOTHING: dict[str, Any] = {
    "tokens_seen": 0,
    "loss": None,
    "frozen": [],
    **{key: {} for key in ("data_identity", "data_content", "model_args", "mesh")},
    **{key: {} for key in ("versions", "config")},
}
"""Manifest keys by which a resume tells another job; this is the same job."""


@functools.cache  # it makes a process group, which is never freed: one for all cases of a pool
def _manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, Checkpoint(enable=True))


class SmallCheckpoint:
    """Where all cases on so many ranks save, one after the other. Every method is collective.

    Args:
        root: a folder that all ranks share.
    """

    def __init__(self, root: Path, world_size: int) -> None:
        self._folder = root / f"checkpoints of {world_size}"
        self._manager = _manager(self._folder)
        if dist.get_rank() == 0:  # from the case before, or from one that broke off
            shutil.rmtree(self._folder, ignore_errors=True)
        dist.barrier()

    def save(self, job: Job, step: int) -> list[str]:
        """Save; names of the tensors that are not, where this rank holds them, as in `job`.

        Where a part of a tensor lies in the whole is known from the initial values, which one
        process agrees with. So a checkpoint that equals the job is one that any mesh can load.
        """
        data = dataclasses.asdict(whole_cursor(job.cursor))
        manifest = NOTHING | {"step": step, "data": data}
        self._manager.save(step, job.tensors, manifest, is_last=True)
        path, local = commit.step_folder(self._folder, step), job.state_dict()
        names = _names(path)
        whole = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in local.items()
            if name in names
        }
        CheckpointWeights(Place("proof", path), str).load(whole)
        saved = {name: part_of(tensor, local[name]) for name, tensor in whole.items()}
        wrong = different(local, saved)  # missing ones included
        dist.barrier()  # no rank continues, and saves anew, while another reads
        return wrong

    def resume(
        self, plan: Plan, meshes: Meshes, source: OpenSource
    ) -> tuple[Job | None, list[str]]:
        """Return a new job that resumes from the checkpoint; or None, if some rank misses
        something, and the names that this rank misses."""
        manifest = self._manager.select_and_verify()
        assert manifest is not None
        job = Job(plan, meshes, source, Cursor.from_json(manifest["data"]))
        for parameter in job.model.parameters():  # memory might still hold the job before
            local_box(parameter.detach())[0].fill_(torch.nan)
        path = commit.step_folder(self._folder, manifest["step"])
        missing = sorted(job.state_dict().keys() - _names(path))
        of_ranks: list[list[str]] = [missing] * dist.get_world_size()
        dist.all_gather_object(of_ranks, missing)
        if any(of_ranks):  # one rank would stop, and the others wait for it
            job.close()
            return None, missing
        self._manager.load(job.tensors, manifest)
        for stage in job.model.stages:
            stage.init_buffers()
            show_attention(stage)
        return job, []


def _names(checkpoint: Path) -> set[str]:
    return {*SafeCheckpointReader(checkpoint).read_metadata().state_dict_metadata}


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of `whole` that this rank holds of `like`, which is sharded or not."""
    mine, offset = local_box(like)
    for dim, (start, length) in enumerate(zip(offset, mine.shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def different(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose parts on this rank differ in a bit, or that one of the two
    lacks."""
    return [
        name
        for name in sorted(mine.keys() | wanted.keys())
        if name not in mine
        or name not in wanted
        or not torch.equal(local_box(mine[name])[0], local_box(wanted[name])[0])
    ]
