"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs and back.

And what routers know of other ranks, to balance their load.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.training import Experts, Training
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import feed_forward, inverse, spread
from meshwright.models.router import BalanceLosses
from meshwright.parallelisms.meshes import Meshes, all_to_all
from meshwright.parallelisms.shards import local_shard


def balance(model: Decoder, meshes: Meshes, training: Training, options: Experts) -> None:
    """Set how routers even out their loads, and how they see sequences that are sharded."""
    tokens = training.global_batch_size * training.seq_len
    losses = BalanceLosses(
        options.balance_loss / tokens,
        options.sequence_balance_loss / tokens,
        options.router_z_loss / tokens,
    )
    groups = tuple(mesh for mesh in (meshes.cp, meshes.tp) if mesh.size() > 1)

    def sum_over_ranks(counts: Tensor) -> Tensor:
        for mesh in groups:
            counts = wait_tensor(all_reduce(counts, "sum", (mesh, 0)))
        return counts

    model.own_part = lambda x: x.chunk(meshes.tp.size(), 1)[meshes.tp.get_local_rank()]
    for mixture in model.mixtures().values():
        mixture.losses, mixture.bias_update_rate = losses, options.bias_update_rate
        mixture.sum_over_ranks = sum_over_ranks


def apply_ep(model: Decoder, mesh: DeviceMesh) -> str:
    """Cut the experts of `model` in place over `mesh`, the ep axis; best on the meta device.

    Ranks of the axis have different tokens, whatever other axes those differ along. A rank sends
    each token's row to the ranks of its experts and gets the results back: no token is dropped.
    Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3. Return a line for the log.
    """
    from torch.distributed.tensor import Shard, distribute_tensor  # takes 0.4 s

    shared = functools.partial(exchanged, mesh=mesh)  # one for all, so that they share a graph
    for mixture in model.mixtures().values():
        experts = mixture.experts
        for name, parameter in [*experts.named_parameters()]:
            cut = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            experts.register_parameter(name, cut)
        experts.compute = shared
    return f"expert parallelism: experts sharded over {mesh.size()} ranks"


def exchanged(
    rows: Tensor, counts: Tensor, activation: str, *weights: Tensor, mesh: DeviceMesh
) -> Tensor:
    """As `feed_forward`, but each expert's rows come from all ranks. Collective over `mesh`.

    The host waits for the device once, in forward: it must know how many rows go where. Blocks for
    the largest load, all rows of a rank to one, would need no wait, but the memory and traffic of
    `mesh.size()` times as many rows; and fewer would drop tokens.
    """
    group, size = mesh.get_group(), mesh.size()
    received, splits = exchange_counts(counts, group.group_name)
    to, by = on_host(splits, len(rows))
    # from (rank, expert) to (expert, rank), so that each expert's rows lie side by side
    expert = torch.arange(received.shape[1], device=rows.device).repeat(size)
    expert = expert.repeat_interleave(received.flatten(), output_size=sum(by))
    order = expert.argsort(stable=True)
    place = inverse(order)
    arrived = spread(all_to_all(rows, by, to, group), order, place.unsqueeze(1), None)
    own = [local_shard(weight) for weight in weights]
    out = feed_forward(arrived, received.sum(0), activation, *own)
    return all_to_all(spread(out, place, order.unsqueeze(1), None), to, by, group)


# one operator, so that activation checkpointing keeps its results: backward doesn't ask again, nor
# does the host wait for the device again
@torch.library.custom_op("meshwright::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Tell every rank of a group how many rows it gets. Collective.

    Args:
        counts: (E,) int64, this rank's rows for each expert.

    Returns:
        (ranks, E / ranks): rows from each rank for each of this rank's experts; and on the host
        (2, ranks): rows to and from each rank.
    """
    # private up to torch 2.13; without it, the group would have to be looked up by its ranks
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    sent = counts.view(group.size(), -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received, torch.stack([sent.sum(1), received.sum(1)]).cpu()


@exchange_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    size = dist.distributed_c10d._resolve_process_group(group_name).size()  # type: ignore[arg-type]
    received = counts.new_empty(size, counts.shape[0] // size)
    return received, counts.new_empty(2, size, device="cpu")


def on_host(splits: Tensor, num_rows: int) -> list[list[int]]:  # (2, ranks) int64
    """Return the values; planning, whose tensors have none, gives equal ones of this sum."""
    found: list[list[int]] = splits.tolist()
    return found
