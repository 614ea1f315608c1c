"""One microbatch of tokens and labels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # tensors that are equal are not one truth value
class Batch:
    """One microbatch of a rank."""

    tokens: Tensor
    """(B, S) int64."""
    labels: Tensor
    """(B, S) int64: the token that follows; the loss's `IGNORE` where that is not to be learned,
    and its `PADDING` where the position has no token."""
    documents: Tensor | None = None
    """(B, S) int32: which document of its sequence each token belongs to, rising from 0. None:
    attention does not stop between documents. Not cut where context parallelism cuts the others."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the same on `device`."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return the same in page-locked memory, from where copies to a device need not wait."""
        return self._each(Tensor.pin_memory)

    def send(self, device: torch.device) -> "Batch":
        """Return the same on `device`; the host does not wait for it."""
        batch = self.pin_memory() if device.type == "cuda" else self
        return batch.to(device, non_blocking=True)

    def _each(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        documents = None if self.documents is None else move(self.documents)
        return Batch(move(self.tokens), move(self.labels), documents)
