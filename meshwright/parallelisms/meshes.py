"""Degrees of parallelism to process groups."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallelisms.parallel_dims import AXES, ParallelDims


@dataclass(frozen=True)
class Meshes:
    """The meshes that a job uses; this rank's groups are in them.

    Meshes over the same ranks share a process group; so do all axes of size 1.
    """

    world: DeviceMesh
    """All ranks as one axis: the default process group."""
    dp: DeviceMesh
    """dp_replicate x dp_shard as one axis: who reads which samples."""
    cp: DeviceMesh
    """Who has which part of every sequence."""
    loss: DeviceMesh
    """dp x cp as one axis: sums over tokens."""
    parameters: DeviceMesh
    """pp, dp_replicate, fsdp, tp. The axis fsdp is dp_shard x cp, since ranks of a cp group have
    the same parameters to update, and so share in holding them."""
    fsdp: DeviceMesh
    """Axes of `parameters` over which they are replicated (if more than one copy) and sharded."""
    tp: DeviceMesh
    """Who holds which part of each matrix, and of the sequence between them."""
    pp: DeviceMesh
    """Who has which layers."""


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Make the process groups of every axis. Collective: all ranks of the job must call it."""
    degrees = {axis: getattr(dims, axis) for axis in AXES}
    ranks = torch.arange(dist.get_world_size()).reshape(list(degrees.values()))
    here = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups: dict[tuple[str, ...], ProcessGroup] = {}

    def group(*axes: str) -> ProcessGroup:
        """Return this rank's group of the ranks that differ along `axes` alone."""
        divided = tuple(axis for axis in axes if degrees[axis] > 1)
        where = zip(AXES, here, strict=True)
        members = ranks[tuple(slice(None) if axis in divided else at for axis, at in where)]
        if members.numel() == ranks.numel():
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if divided not in groups:
            # Only its members make a group: otherwise every rank makes the groups of all others.
            # All ranks make theirs in the same order, so none waits for another in a circle.
            groups[divided] = dist.new_group(
                members.flatten().tolist(),
                use_local_synchronization=True,
                group_desc=f"mesh_{'_'.join(divided) or 'self'}",
            )
        return groups[divided]

    def line(name: str, *axes: str) -> DeviceMesh:
        return DeviceMesh.from_group(group(*axes), device_type, mesh_dim_names=(name,))

    # not init_device_mesh, which makes new groups for each mesh, however often it did so before
    parameters = DeviceMesh.from_group(
        [group("pp"), group("dp_replicate"), group("dp_shard", "cp"), group("tp")],
        device_type,
        ranks.flatten(2, 3),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    copies = ("dp_replicate",) if dims.dp_replicate > 1 else ()
    return Meshes(
        world=line("world", *AXES),
        dp=line("dp", "dp_replicate", "dp_shard"),
        cp=line("cp", "cp"),
        loss=line("loss", "dp_replicate", "dp_shard", "cp"),
        parameters=parameters,
        fsdp=parameters[(*copies, "fsdp")],
        tp=parameters["tp"],
        pp=parameters["pp"],
    )
