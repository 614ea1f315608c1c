"""The output projection: from hidden states to logits, or with labels to their loss."""

from torch import Tensor, nn

from meshwright.models.layers.loss import SummedLoss
from meshwright.models.layers.mixed import Linear


class Projection(Linear):
    """A projection with a weight of its own.

    `loss` knows how to multiply by the weight, so that tensor parallelism has one thing to replace.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size)
        self.loss = SummedLoss()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, S, D) -> (B, S, V) logits, or with (B, S) labels their summed loss."""
        return _project(self.loss, x, self.weight, labels)


class TiedProjection(nn.Module):
    """A projection by a weight that belongs to another module, the embedding.

    Source: Press and Wolf 2016, arXiv:1608.05859. It holds no second name of the weight, because
    sharing does not survive the move from meta, which gives every module tensors of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = SummedLoss()

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `Projection`'s, with (V, D) weight."""
        return _project(self.loss, x, weight, labels)


def _project(loss: SummedLoss, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
    return loss.logits(x, weight) if labels is None else loss(x, weight, labels)
