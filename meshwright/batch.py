"""What a step reads for one microbatch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of one rank and microbatch."""

    tokens: Tensor
    """(B, S) int64."""
    labels: Tensor
    """(B, S) int64; `loss.IGNORE` where the loss counts nothing."""
    documents: Tensor | None = None
    """(B, S) int32: which document of its sequence a position belongs to, rising from 0; None:
    attention does not stop between documents."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """The same on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same in pinned memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        documents = None if self.documents is None else function(self.documents)
        return Batch(function(self.tokens), function(self.labels), documents)
