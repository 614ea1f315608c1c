"""Degrees of parallelism to process groups."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from meshwright.parallelisms.rules.degrees import AXES, ParallelDims
from meshwright.system.machine import GLOO, LOOPBACK


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
    stage: DeviceMesh
    """All axes but pp as one: the ranks that together hold, and update, the same layers."""
    experts: DeviceMesh | None = None
    """As `fsdp`, for experts: the ranks of dp_shard, cp and tp, arranged as efsdp x ep. None: as
    all other parameters, or there are no experts."""
    ep: DeviceMesh | None = None
    """Who has which experts: neighboring ranks, which communicate most."""

    @property
    def all(self) -> list[DeviceMesh]:
        """Meshes that have all of the groups between them. Where several share a group, the last
        says the most about it."""
        used = [self.stage, self.world, self.dp, self.loss, self.ep, self.experts]
        return [mesh for mesh in (*used, self.parameters, self.cp) if mesh is not None]


def build_meshes(dims: ParallelDims, device_type: str) -> Meshes:
    """Make the process groups of every axis. Collective: all ranks of the job must call it."""
    ranks = torch.arange(dist.get_world_size()).reshape([getattr(dims, axis) for axis in AXES])
    here = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups: dict[tuple[int, ...], ProcessGroup] = {}

    def group_of(members: Tensor, name: str, *, is_own: bool = False) -> ProcessGroup:
        """Return the group of these ranks; one that is its own is shared with no other mesh."""
        if members.numel() == ranks.numel() and not is_own:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        key = (*members.flatten().tolist(), is_own)
        if key not in groups:
            # Only its members make a group: otherwise every rank makes the groups of all others.
            # All ranks make theirs in the same order, so none waits for another in a circle.
            groups[key] = dist.new_group(
                members.flatten().tolist(),
                use_local_synchronization=True,
                group_desc=f"mesh_{name if members.numel() > 1 else 'self'}",
            )
        return groups[key]

    def line(name: str, *axes: str) -> DeviceMesh:
        """Return a mesh of one axis: the ranks that differ from this one along `axes` only."""
        where = zip(AXES, here, strict=True)
        members = ranks[tuple(slice(None) if axis in axes else at for axis, at in where)]
        return DeviceMesh.from_group(group_of(members, name), device_type, mesh_dim_names=(name,))

    def arranged(axes: Mapping[str, int], own: str = "") -> DeviceMesh:
        """Return the mesh of all ranks with axes of these lengths; the group of `own` is its own.

        Not init_device_mesh, which makes new groups for each mesh, however often it did so before.
        """
        whole = ranks.view(*axes.values())
        place = (whole == dist.get_rank()).nonzero()[0].tolist()
        members = (whole[(*place[:i], slice(None), *place[i + 1 :])] for i in range(len(axes)))
        own_groups = [
            group_of(part, name, is_own=name == own)
            for name, part in zip(axes, members, strict=True)
        ]
        return DeviceMesh.from_group(own_groups, device_type, whole, mesh_dim_names=tuple(axes))

    outer = {"pp": dims.pp, "dp_replicate": dims.dp_replicate}
    parameters = arranged(outer | {"fsdp": dims.dp_shard * dims.cp, "tp": dims.tp})
    copies = ("dp_replicate",) if dims.dp_replicate > 1 else ()
    experts = None
    if dims.has_own_experts:
        # FSDP2 tells the groups of a block apart by their process groups
        experts = arranged(outer | {"efsdp": dims.efsdp, "ep": dims.ep}, own="efsdp")
    return Meshes(
        world=line("world", *AXES),
        dp=line("dp", "dp_replicate", "dp_shard"),
        cp=line("cp", "cp"),
        loss=line("loss", "dp_replicate", "dp_shard", "cp"),
        parameters=parameters,
        fsdp=parameters[(*copies, "fsdp")],
        tp=parameters["tp"],
        pp=parameters["pp"],
        stage=line("stage", "dp_replicate", "dp_shard", "cp", "tp"),
        experts=experts[(*copies, "efsdp")] if experts else None,
        ep=experts["ep"] if experts and dims.ep > 1 else None,
    )


# The public name is there in torch 2.15 and not in 2.13, the private one deprecated there. Without
# either, one timeout would have to do for compilation and for training.
_set_timeout = (
    dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
)

LATE_S = 5
"""Seconds beyond the limit: an error of torch's own says more."""

STORE_S, TRY_S = 60.0, 5.0
"""Seconds that torchrun's store gets to answer a rank, and one try to connect."""

REACH = "open every port between the nodes: ranks listen on any that is free"

OTHER_NETWORK = "set GLOO_SOCKET_IFNAME to the interface by which nodes reach each other"


def start_process_group(device: torch.device, timeout_s: int) -> None:
    """Join the ranks that torchrun started; without torchrun, be the only one.

    On GPUs all collectives are NCCL's. Where hosts communicate while GPUs work (checkpoints, the
    vote on a stop), that part makes a gloo group of its own.
    """
    backend = "gloo" if device.type == "cpu" else "nccl"
    timeout = timedelta(seconds=timeout_s)
    # Without device_id, NCCL makes a group's communicator at its first collective. With it, torch
    # would make all communicators at once, used or not.
    store: dist.Store = dist.HashStore()
    rank, size = 0, 1
    if "RANK" in os.environ:
        _check_way(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts ranks again, with the addresses of dead ones
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    else:  # gloo would look up the name of this machine, which may lead nowhere
        os.environ.setdefault(GLOO, LOOPBACK)
    begin = partial(
        dist.init_process_group,
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    if backend == "nccl":  # its threads belong to a device
        begin()
        return
    # where gloo listens for a rank that has told its address, and is gone or behind a firewall, it
    # waits for ever
    connecting = ThreadPoolExecutor(1).submit(begin)
    try:
        connecting.result(timeout_s + LATE_S)
    except TimeoutError:
        late = f"timed out: a rank has not connected for {timeout_s} s"
        raise RuntimeError(f"{late}\n  fix: {REACH}") from None
    except RuntimeError as error:
        if "connectFullMesh" in str(error):
            error.add_note(f"  fix: {OTHER_NETWORK if '[127.' in str(error) else REACH}")
        raise


def _check_way(host: str, port: int, timeout_s: float) -> None:
    """Raise RuntimeError if the store of the ranks doesn't answer, though torchrun has it ready
    before a rank starts: torch itself would try for longer, and say it on a page of C++."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the first rank is to make it
        return
    end = time.monotonic() + min(timeout_s / 2, STORE_S)  # before other nodes give up
    while True:
        try:
            socket.create_connection((host, port), TRY_S).close()
        except OSError as error:
            if time.monotonic() > end:
                where = f"{socket.gethostname()} does not reach {host}:{port}, where all ranks meet"
                raise RuntimeError(f"{where}: {error.strerror or error}\n  fix: {REACH}") from None
            time.sleep(TRY_S / 5)
        else:
            return


def barrier() -> None:
    """Wait until every rank is here. Collective."""
    # NCCL needs a device, which torch would guess and warn that it did
    is_nccl = dist.get_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if is_nccl else None)


def set_timeout(meshes: Meshes, timeout_s: int) -> None:
    """From now on no collective, in any group of `meshes` or in the whole job, may take longer."""
    groups = {group.group_name: group for mesh in meshes.all for group in mesh.get_all_groups()}
    for group in groups.values():
        _set_timeout(timedelta(seconds=timeout_s), group)


NUM_SHOWN = 5
"""Collectives of a kind that are worth telling of."""


def last_collectives() -> str:
    """Return the collectives that tell the most of a hang, from torch's flight recorders.

    Of NCCL the first that this rank's GPU hasn't completed, since the host starts collectives long
    before; otherwise the last that the host started. Empty if torch records none: the names are
    private, and the buffers may be off.
    """
    # gloo has its own recorder; torch without CUDA has no NCCL
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
    """Return the entries that a function of torch dumps, oldest first; none if it isn't there."""
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


# torch 2.13 deprecates the only name that 2.11 has
_all_gather: Callable[..., Tensor] = (
    _functional_collectives.all_gather_single_autograd
    if hasattr(_functional_collectives, "all_gather_single_autograd")
    else _functional_collectives.all_gather_tensor_autograd
)

_reduce_scatter: Callable[..., Tensor] = (
    _functional_collectives.reduce_scatter_single
    if hasattr(_functional_collectives, "reduce_scatter_single")
    else _functional_collectives.reduce_scatter_tensor
)


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(n, ...) -> (ranks * n, ...), in their order; backward is a reduce-scatter. Collective.

    Args:
        mesh: of one axis.
    """
    return _all_gather(x.contiguous(), gather_dim=0, group=(mesh, 0))


def reduce_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(ranks * n, ...) -> (n, ...): this rank's part of the sum over ranks; without gradient.
    Collective.

    Args:
        mesh: of one axis.
    """
    return _reduce_scatter(x.contiguous(), "sum", scatter_dim=0, group=(mesh, 0))


def all_to_all(rows: Tensor, by: list[int], to: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to every rank of a group, and get theirs; backward goes the other way. Collective.

    Args:
        by, to: rows that come from each rank, and that go to each.

    The operator gives a new tensor, so that selective activation checkpointing can keep it.
    """
    rows = _functional_collectives.all_to_all_single_autograd(rows.contiguous(), by, to, group)
    return _functional_collectives.wait_tensor(rows)
