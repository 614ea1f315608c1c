"""Context parallelism of layers with a window: a rank gets the few tokens before its chunks that
their windows see, and no others.

Who sends what to whom follows from four numbers, so ranks don't ask each other. If the chunks
before one are shorter than a window, it sees several of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallelisms.meshes import all_to_all
from meshwright.parallelisms.sequence_parts import chunks_of


class Tail(NamedTuple):
    """The last tokens of a chunk."""

    chunk: int
    num_tokens: int


@dataclass(frozen=True)
class Halo:
    """Which tokens a rank of the cp axis has besides its own, for queries with a window.

    A rank has its own two chunks, and after them what ranks 0, 1, ... send it, in `tails`.
    """

    window: int
    """Tokens that a token sees, with itself."""
    length: int
    """Of a chunk."""
    rank: int
    size: int

    def reach(self, chunk: int, before: int) -> int:
        """Return how many tokens of chunk `before` the first token of a later `chunk` sees."""
        between = (chunk - before - 1) * self.length
        return min(max(self.window - 1 - between, 0), self.length) if before < chunk else 0

    def sent(self, sender: int, receiver: int) -> list[Tail]:
        """Return what one rank sends to another, once even if both chunks there see it."""
        if sender == receiver:
            return []
        tails = []
        for chunk in chunks_of(sender, self.size):
            count = max(self.reach(later, chunk) for later in chunks_of(receiver, self.size))
            if count > 0:
                tails.append(Tail(chunk, count))
        return tails

    @property
    def tails(self) -> list[Tail]:
        """The tokens that the rank has, in their order in its memory."""
        found = [Tail(chunk, self.length) for chunk in chunks_of(self.rank, self.size)]
        for sender in range(self.size):
            found += self.sent(sender, self.rank)
        return found

    def seen(self, chunk: int) -> list[slice]:
        """Return where the tokens lie that queries of an own `chunk` see at most."""
        found, end = [], 0
        for before, count in self.tails:
            end += count
            seen = count if before == chunk else self.reach(chunk, before)
            if seen > 0:
                found.append(slice(end - seen, end))
        return found

    def positions(self, device: torch.device) -> Tensor:
        """Return the places in the sequence of the tokens that the rank has: (keys,) int64."""
        ends = [(chunk + 1) * self.length for chunk, _ in self.tails]
        parts = zip(ends, self.tails, strict=True)
        return torch.cat([torch.arange(end - n, end, device=device) for end, (_, n) in parts])


def halo_of(window: int | None, seq_len: int, mesh: DeviceMesh) -> Halo | None:
    """Return the halo of this rank of the cp axis `mesh`; None: its tokens see all before them."""
    if window is None or window >= seq_len:
        return None
    return Halo(window, seq_len // (2 * mesh.size()), mesh.get_local_rank(), mesh.size())


def add_halo(own: Sequence[Tensor], halo: Halo, mesh: DeviceMesh) -> list[Tensor]:
    """(B, K, S/cp, W) each -> (B, K, S/cp + received, W) each, in the order of `Halo.tails`.

    Collective in forward and backward, which sends the gradients of received tokens back.
    """
    if halo.window == 1:  # of no rank does a token see another
        return [*own]
    rank, ranks, chunks = halo.rank, range(halo.size), chunks_of(halo.rank, halo.size)
    sent = []
    for receiver in ranks:
        for chunk, count in halo.sent(rank, receiver):
            end = (chunks.index(chunk) + 1) * halo.length
            tail = slice(end - count, end)
            sent.append(torch.cat([x[:, :, tail] for x in own], -1).movedim(2, 0))
    by = [sum(count for _, count in halo.sent(sender, rank)) for sender in ranks]
    to = [sum(count for _, count in halo.sent(rank, receiver)) for receiver in ranks]
    received = all_to_all(torch.cat(sent), by, to, mesh.get_group()).movedim(0, 2)
    parts = received.split([x.shape[-1] for x in own], -1)
    return [torch.cat(pair, 2) for pair in zip(own, parts, strict=True)]
