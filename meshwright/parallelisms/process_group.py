"""The job's process group: its beginning, its patience, its end."""

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
        _set_timeout(timedelta(seconds=timeout_s), group)
