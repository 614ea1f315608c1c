"""The job's process group, its timeouts, and a barrier."""

import json
import os
from datetime import timedelta

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


NUM_LAST = 5
"""Collectives that are worth telling of."""


def last_collectives() -> str:
    """Return the last collectives that this rank began, newest first, from torch's flight recorder.

    Empty if torch records none: the name is private, and for NCCL the buffer may be off.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    entries = json.loads(dump(True, False)).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"], reverse=True)
    lines = ["last collectives, newest first:"] * bool(entries)
    for entry in entries[:NUM_LAST]:
        name, group = entry["profiling_name"], entry["process_group"][0]
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        sizes = entry["input_sizes"]
        lines.append(f"  {name} {sizes}, number {number} of group {group}: {entry['state']}")
    return "\n".join(lines)
