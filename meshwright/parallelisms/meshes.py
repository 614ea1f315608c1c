"""Degrees of parallelism to process groups."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallelisms.parallel_dims import AXES, ParallelDims


@dataclass(frozen=True)
class Meshes:
    """The meshes that a job uses; this rank's groups are in them."""

    world: DeviceMesh
    """All five axes, `AXES`."""
    dp: DeviceMesh
    """dp_replicate x dp_shard as one axis: who reads which samples."""
    cp: DeviceMesh
    """Who has which part of every sequence."""
    loss: DeviceMesh
    """dp x cp as one axis: sums over tokens."""
    parameters: DeviceMesh
    """pp, dp_replicate, fsdp, tp: as `world`, but dp_shard x cp is one axis, since ranks of a cp
    group have the same parameters to update, and so share in holding them."""
    fsdp: DeviceMesh
    """Axes of `parameters` over which they are replicated (if more than one copy) and sharded."""
    tp: DeviceMesh
    """Who holds which part of each matrix, and of the sequence between them."""
    pp: DeviceMesh
    """Who has which layers."""


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Make the process groups of every axis. Collective: all ranks of the job must call it."""
    world = init_device_mesh(
        device_type, tuple(getattr(dims, axis) for axis in AXES), mesh_dim_names=AXES
    )
    # a mesh of its own: an axis flattened out of `world` cannot be an axis of a slice of it
    parameters = init_device_mesh(
        device_type,
        (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    copies = ("dp_replicate",) if dims.dp_replicate > 1 else ()
    return Meshes(
        world=world,
        # DeviceMesh._flatten has no public name up to torch 2.13; without it, new_group over the
        # ranks of each slice would do
        dp=world["dp_replicate", "dp_shard"]._flatten("dp"),
        cp=world["cp"],
        loss=world["dp_replicate", "dp_shard", "cp"]._flatten("loss"),
        parameters=parameters,
        fsdp=parameters[(*copies, "fsdp")],
        tp=parameters["tp"],
        pp=parameters["pp"],
    )
