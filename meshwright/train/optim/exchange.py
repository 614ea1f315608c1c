"""Whole matrices out of the ranks' parts: each is on one rank, its owner, for a moment."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.parallelisms.shards import Box, boxes_of_ranks, is_dtensor, part_of_box


class Move(NamedTuple):
    """A part of a matrix on its way. Ranks are those in the group."""

    matrix: int
    sender: int
    receiver: int
    box: Box


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
        owners = self._share_out()
        self._owned = [i for i, owner in enumerate(owners) if owner == self._me]
        self._in, self._back = list[Move](), list[Move]()
        """The moves that concern this rank."""
        for i, (boxes, owner) in enumerate(zip(self._boxes, owners, strict=True)):
            there = [Move(i, rank, owner, boxes[rank]) for rank in first_copies(boxes, owner)]
            back = [Move(i, owner, rank, box) for rank, box in boxes.items()]
            self._in += [move for move in there if self._me in move[1:3]]
            self._back += [move for move in back if self._me in move[1:3]]

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
        found = {i: parts[0].new_empty(self._shapes[i]) for i in self._owned}
        for move, part in self._swap(self._in, lambda move: parts[move.matrix], parts[0]):
            part_of_box(found[move.matrix], move.box).copy_(part)
        return found

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's part of every matrix. Collective.

        Args:
            wholes: of the matrices that this rank owns, by index.
            like: a tensor of their type and device.
        """
        if self._size == 1:
            return [wholes[index] for index in range(len(self._shapes))]
        moved = self._swap(self._back, lambda m: part_of_box(wholes[m.matrix], m.box), like)
        found = {move.matrix: part for move, part in moved}
        return [found[index] for index in range(len(self._shapes))]

    def _swap(
        self, moves: Sequence[Move], content: Callable[[Move], Tensor], like: Tensor
    ) -> Iterator[tuple[Move, Tensor]]:
        """Send the `content` of moves, and yield moves to this rank with theirs."""
        # a sort keeps the order of two ranks' moves, so both sides have the same
        sent = sorted((m for m in moves if m.sender == self._me), key=lambda m: m.receiver)
        awaited = sorted((m for m in moves if m.receiver == self._me), key=lambda m: m.sender)
        out_sizes, in_sizes = [0] * self._size, [0] * self._size
        for move in sent:
            out_sizes[move.receiver] += math.prod(move.box[1])
        for move in awaited:
            in_sizes[move.sender] += math.prod(move.box[1])
        outgoing = torch.cat([like.new_empty(0), *(content(m).reshape(-1) for m in sent)])
        incoming = like.new_empty(sum(in_sizes))
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, self._group)
        pieces = incoming.split([math.prod(move.box[1]) for move in awaited])
        for move, piece in zip(awaited, pieces, strict=True):
            yield move, piece.view(move.box[1])


def first_copies(boxes: Mapping[int, Box], owner: int) -> set[int]:
    """Return the ranks, one for each different part, that give it to the owner: itself before
    others, and otherwise the nearest."""
    nearest: dict[Box, int] = {}
    for rank in sorted(boxes, key=lambda rank: (abs(rank - owner), rank)):
        nearest.setdefault(boxes[rank], rank)
    return set(nearest.values())
