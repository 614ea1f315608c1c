"""The gated feed-forward block."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.layers.mixed import Linear
from meshwright.models.table import FeedForwardSpec


class FeedForward(nn.Module):
    """SwiGLU block, w2(silu(w1 x) * w3 x), without biases.

    Source: Shazeer 2020, arXiv:2002.05202 (FFN_SwiGLU). Names of weights are Meta's.
    """

    def __init__(self, spec: FeedForwardSpec) -> None:
        super().__init__()
        dim, hidden_dim = spec.dim, spec.hidden_dim
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
