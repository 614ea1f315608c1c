"""The job's process group, its timeouts, and a barrier."""

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallelisms.meshes import Meshes

# The public name is there in torch 2.15 and not in 2.13, the private one deprecated there. Without
# either, one timeout would have to do for compilation and for training.
_set_timeout = (
    dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
)


def start_process_group(device: torch.device, timeout_s: int) -> None:
    """Join the ranks that torchrun started; without torchrun, be the only one.

    On GPUs all collectives are NCCL's. Where hosts communicate while GPUs work (checkpoints, the
    vote on a stop), that part makes a gloo group of its own.
    """
    backend = "gloo" if device.type == "cpu" else "nccl"
    timeout = timedelta(seconds=timeout_s)
    # Without device_id, NCCL makes a group's communicator at its first collective. With it, torch
    # would make all communicators at once, used or not.
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )


def barrier() -> None:
    """Wait until every rank is here. Collective."""
    # NCCL needs a device, which torch would guess and warn that it did
    is_nccl = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if is_nccl else None)


def set_timeout(meshes: Meshes, timeout_s: int) -> None:
    """From now on no collective, in any group of `meshes` or in the whole job, may take longer."""
    groups = {
        group.group_name: group
        for mesh in (meshes.world, meshes.parameters, meshes.dp, meshes.cp, meshes.loss)
        for group in mesh.get_all_groups()
    }
    for group in groups.values():
        _set_timeout(timedelta(seconds=timeout_s), group)


NUM_SHOWN = 5
"""Collectives of a kind that are worth telling of."""


def last_collectives() -> str:
    """Return the collectives that tell the most of a hang, from torch's flight recorders.

    Of NCCL the first that this rank's GPU has not completed, since the host begins collectives long
    before; otherwise the last that the host began. Empty if torch records none: the names are
    private, and the buffers may be off.
    """
    # gloo has a recorder of its own; torch without CUDA has no NCCL
    of_nccl, of_gloo = _recorded("_dump_nccl_trace_json"), _recorded("_dump_fr_trace_json")
    lines = []
    if waiting := [entry for entry in of_nccl if entry["state"] != "completed"]:
        title = f"collectives that the GPU has not completed, {len(waiting)} in all, oldest first:"
        lines += [title, *map(_line, waiting[:NUM_SHOWN])]
    begun = of_gloo if waiting else of_gloo + of_nccl
    if newest := sorted(begun, key=_begun_at, reverse=True):
        lines += ["last collectives, newest first:", *map(_line, newest[:NUM_SHOWN])]
    return "\n".join(lines)


def _recorded(name: str) -> list[dict[str, Any]]:
    """Return the entries that a function of torch dumps, oldest first; none if it is not there."""
    dump = getattr(torch._C._distributed_c10d, name, None)
    entries = [] if dump is None else json.loads(dump(True, False)).get("entries", [])
    return sorted(entries, key=_begun_at)


def _begun_at(entry: dict[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _line(entry: dict[str, Any]) -> str:
    name, group = entry["profiling_name"], entry["process_group"][0]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    sizes, state = entry["input_sizes"], entry["state"]
    return f"  {name} {sizes}, number {number} of group {group}: {state}"
