"""The job's process group: its beginning, its patience, its end."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

# Private, without a public name up to torch 2.13; without it one timeout would have to do for
# compilation and for training.
from torch.distributed.distributed_c10d import _set_pg_timeout

from meshwright.parallelisms.meshes import Meshes


def start_process_group(device: torch.device, timeout_s: int) -> None:
    """Join the ranks that torchrun started; without torchrun, be the only one."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    device_id = None if device.type == "cpu" else device
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        alone = dist.HashStore()
        dist.init_process_group(
            backend, store=alone, rank=0, world_size=1, timeout=timeout, device_id=device_id
        )


def set_timeout(meshes: Meshes, timeout_s: int) -> None:
    """From now on no collective, in any group of `meshes` or in the whole job, may take longer."""
    groups = [
        group
        for mesh in (meshes.world, meshes.parameters, meshes.dp, meshes.loss)
        for group in mesh.get_all_groups()
    ]
    for group in (*groups, None):
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
