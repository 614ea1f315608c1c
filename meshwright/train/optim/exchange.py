"""Whole matrices out of the ranks' parts: each is on one rank, its owner, for a moment."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.parallelisms.shards import Box, boxes_of_ranks, is_dtensor


class Exchange:
    """Brings the parts of every matrix to its owner, and parts of the results back.

    Each matrix is on one rank of a stage, so its result is computed once, from the same numbers in
    the same layout on every mesh; replicas get the same bits. A rank sends its shard and receives
    its shard: a gather by every rank would bring each of them all matrices.

    Args:
        matrices: parameters, (..., R, C), in the same order on every rank.
        group: the ranks that hold them; None: this one alone.
    """

    def __init__(self, matrices: Sequence[Tensor], group: ProcessGroup | None) -> None:
        self._group = group
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._size, self._me = len(ranks), 0 if group is None else dist.get_rank(group)
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        self._boxes: list[dict[int, Box]] = []
        """Of each matrix, by rank in the group."""
        for matrix in matrices:
            whole: Box = ((0,) * matrix.dim(), tuple(matrix.shape))
            boxes = boxes_of_ranks(matrix) if is_dtensor(matrix) else dict.fromkeys(ranks, whole)
            self._boxes.append({ranks.index(rank): box for rank, box in boxes.items()})
        self._owners = self._share_out()
        self.owned = [i for i, owner in enumerate(self._owners) if owner == self._me]
        """Indices of the matrices that this rank computes."""
        self._givers = [
            _first_copies(boxes, owner)
            for boxes, owner in zip(self._boxes, self._owners, strict=True)
        ]

    def _share_out(self) -> list[int]:
        """Give each matrix, the costliest first, to the rank that has least to compute so far."""
        cost = [math.prod(shape) * min(shape[-2:]) for shape in self._shapes]
        loads, owners = [0] * self._size, [0] * len(cost)
        for index in sorted(range(len(cost)), key=lambda i: -cost[i]):
            owners[index] = min(self._boxes[index], key=lambda rank: (loads[rank], rank))
            loads[owners[index]] += cost[index]
        return owners

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the whole of each matrix that this rank owns, by index. Collective.

        Args:
            parts: this rank's of every matrix, of one type.
        """
        if self._size == 1:
            return dict(enumerate(parts))
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        for index, part in enumerate(parts):
            if self._me in self._givers[index]:
                sent[self._owners[index]].append(part)
        awaited = {
            rank: [self._boxes[i][rank][1] for i in self.owned if rank in self._givers[i]]
            for rank in range(self._size)
        }
        found = {i: parts[0].new_empty(self._shapes[i]) for i in self.owned}
        for rank, received in self._swap(sent, awaited, like=parts[0]).items():
            mine = [i for i in self.owned if rank in self._givers[i]]
            for index, part in zip(mine, received, strict=True):
                _part(found[index], self._boxes[index][rank]).copy_(part)
        return found

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's part of every matrix. Collective.

        Args:
            wholes: of the matrices that this rank owns, by index.
            like: a tensor of their type and device.
        """
        if self._size == 1:
            return [wholes[index] for index in range(len(self._shapes))]
        sent = [
            [_part(wholes[i], self._boxes[i][rank]) for i in self.owned if rank in self._boxes[i]]
            for rank in range(self._size)
        ]
        by_owner = {
            rank: [i for i, owner in enumerate(self._owners) if owner == rank]
            for rank in range(self._size)
        }
        awaited = {
            rank: [self._boxes[index][self._me][1] for index in owned]
            for rank, owned in by_owner.items()
        }
        found = {
            index: part
            for rank, received in self._swap(sent, awaited, like).items()
            for index, part in zip(by_owner[rank], received, strict=True)
        }
        return [found[index] for index in range(len(self._shapes))]

    def _swap(
        self,
        sent: Sequence[Sequence[Tensor]],
        awaited: Mapping[int, Sequence[tuple[int, ...]]],
        like: Tensor,
    ) -> dict[int, Sequence[Tensor]]:
        """Send tensors to each rank, and receive from each those of the shapes `awaited`."""
        flat = [part.reshape(-1) for of_rank in sent for part in of_rank]
        sizes = [[math.prod(shape) for shape in awaited[rank]] for rank in range(self._size)]
        outgoing = torch.cat(flat) if flat else like.new_empty(0)
        incoming = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            incoming,
            outgoing,
            [sum(size) for size in sizes],
            [sum(part.numel() for part in of_rank) for of_rank in sent],
            self._group,
        )
        pieces = iter(incoming.split([n for size in sizes for n in size]))
        return {
            rank: [next(pieces).view(shape) for shape in awaited[rank]]
            for rank in range(self._size)
        }


def _first_copies(boxes: Mapping[int, Box], owner: int) -> set[int]:
    """Return the ranks, one for each different part, that give it to the owner: itself before
    others, and otherwise the nearest."""
    nearest: dict[Box, int] = {}
    for rank in sorted(boxes, key=lambda rank: (abs(rank - owner), rank)):
        nearest.setdefault(boxes[rank], rank)
    return set(nearest.values())


def _part(whole: Tensor, box: Box) -> Tensor:
    offset, shape = box
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole
