"""Degrees of parallelism to process groups."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallelisms.parallel_dims import AXES, ParallelDims


@dataclass(frozen=True)
class Meshes:
    """The meshes that a job uses, all cut from one; this rank's groups are in them."""

    world: DeviceMesh
    """All five axes, `AXES`."""
    dp: DeviceMesh
    """dp_replicate x dp_shard as one axis: who reads which samples."""
    fsdp: DeviceMesh
    """Axes over which parameters are replicated (if there is more than one copy) and sharded:
    dp_shard x cp as one."""
    cp: DeviceMesh
    """Who has which part of every sequence."""
    tp: DeviceMesh
    """Who holds which part of each matrix, and of the sequence between them."""
    loss: DeviceMesh
    """dp x cp as one axis: sums over tokens."""


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Make the process groups of every axis. Collective: all ranks of the job must call it."""
    world = init_device_mesh(
        device_type, tuple(getattr(dims, axis) for axis in AXES), mesh_dim_names=AXES
    )
    # DeviceMesh._flatten has no public name up to torch 2.13; without it, new_group over the
    # ranks of each slice would do
    dp = world["dp_replicate", "dp_shard"]._flatten("dp")
    loss = world["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    # ranks of a cp group have the same parameters to update: they share in holding them
    world["dp_shard", "cp"]._flatten("fsdp")
    fsdp = world["dp_replicate", "fsdp"] if dims.dp_replicate > 1 else world["fsdp"]
    return Meshes(world=world, dp=dp, fsdp=fsdp, cp=world["cp"], tp=world["tp"], loss=loss)
