"""The output projection of a model whose embedding is that projection too."""

import torch.nn.functional as F
from torch import Tensor, nn


class TiedProjection(nn.Module):
    """Logits by a weight that belongs to another module.

    Source: Press and Wolf 2016, arXiv:1608.05859. It holds no second name of the weight, because
    sharing does not survive the move from meta, which gives every module tensors of its own.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # (B, S, D), (V, D) -> (B, S, V)
        return F.linear(x, weight)
