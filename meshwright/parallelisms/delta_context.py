"""Context parallelism of linear attention: ranks exchange what their chunks do to the state, not
tokens.

A chunk of a sequence is an affine map of the state, of a head K x (K + V) numbers whatever the
chunk's length. Every rank computes the maps of its two chunks, gathers all maps, and composes the
ones before each of its own. So there is no ring in which ranks wait for each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.delta_net import convolve, split_heads
from meshwright.models.delta_rule import read_chunks, scan, split_in_chunks
from meshwright.parallelisms.meshes import all_gather
from meshwright.parallelisms.sequence_parts import chunks_of


def recur(
    rows: Tensor,
    taps: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None,
    *,
    value_dim: int,
    key_dim: int,
    mesh: DeviceMesh,
) -> Tensor:
    """(B, S/cp, W) -> (B, S/cp, H, V) fp32, as `DeltaCore` does it for whole sequences.

    Collective over `mesh`, in forward and backward.

    Args:
        documents: (B, S) int, of the whole sequences.
    """
    chunks, behind = chunks_of(mesh.get_local_rank(), mesh.size()), taps.shape[1] - 1
    rows, decay, strength = (_by_chunk(x) for x in (rows, decay, strength))
    batch, length = rows.shape[1:3]
    ends = _gather_in_order(rows[:, :, -min(behind, length) :], mesh)
    tails = torch.cat([ends[0].new_zeros(batch, behind, rows.shape[-1]), *ends], 1)
    # if chunks are shorter than the filter, it sees several of them
    first = [chunk * ends[0].shape[1] for chunk in chunks]
    halos = torch.stack([tails[:, start : start + behind] for start in first])
    whole = torch.cat([halos, rows], 2).flatten(0, 1)

    seen = own = before = None
    if documents is not None:
        padded = F.pad(documents, (behind, 0))
        starts = [chunk * length for chunk in chunks]
        seen = torch.cat([padded[:, start : start + behind + length] for start in starts])
        own = seen[:, behind:]
        before = torch.cat([documents[:, max(start - 1, 0)] for start in starts])
    q, k, v = split_heads(convolve(whole, taps, seen), decay.shape[-1], key_dim, value_dim)
    parts = split_in_chunks(q, k, v, decay.flatten(0, 1), strength.flatten(0, 1), own, before)

    # the states of a start from zeros, and next to them what they take of any other
    unit = torch.eye(key_dim, device=v.device).expand(*parts.maps.shape[:2], -1, -1)
    both = torch.cat([torch.zeros_like(parts.additions[:, :, 0]), unit], -1)
    states = scan(parts.maps, F.pad(parts.additions, (0, key_dim)), both)
    maps = _gather_in_order(states[:, :, -1].unflatten(0, (2, -1)), mesh)
    state = torch.zeros_like(maps[0][..., :value_dim])
    before_chunk = []
    for one in maps:
        before_chunk.append(state)
        state = one[..., value_dim:] @ state + one[..., :value_dim]
    start = torch.cat([before_chunk[chunk] for chunk in chunks]).unsqueeze(2)
    states = states[:, :, :-1]
    states = states[..., :value_dim] + states[..., value_dim:] @ start
    out = read_chunks(parts, states)[:, :length]
    return out.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def _by_chunk(x: Tensor) -> Tensor:
    """(B, S/cp, ...) -> (2, B, S/2cp, ...): a rank's two chunks."""
    return torch.stack(x.chunk(2, 1))


def _gather_in_order(own: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """(2, ...), of this rank's chunks -> of all chunks, in the order of the sequence."""
    parts = all_gather(own.unsqueeze(0), mesh)  # (cp, 2, ...)
    return [*parts[:, 0].unbind(0), *parts[:, 1].flip(0).unbind(0)]
