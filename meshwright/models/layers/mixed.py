"""Layers that compute in the type of their input, whatever their weights are kept in.

Weights may be fp32, as the optimizer has them, and activations bfloat16. A weight is then cast
where it is used, and again where backward computes a layer again. Its gradient is cast back, and
microbatches are added up in the type of the weight. If the types are equal, nothing is copied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A matrix product without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square, then a weight.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Embedding(nn.Embedding):
    """A table of vectors. Ids have no type to follow, so `dtype` is that of the activations.

    The table is cast, not the vectors taken from it: gradients of a token are then added up in the
    same type as by FSDP2, which casts tables too.
    """

    dtype: torch.dtype | None = None
    """None: that of the table."""

    def forward(self, tokens: Tensor, *, table: Tensor | None = None) -> Tensor:
        """(B, S) int64 -> (B, S, D).

        Args:
            table: the result of `cast_table`, if it is used elsewhere, too.
        """
        return F.embedding(tokens, self.cast_table() if table is None else table)

    def cast_table(self) -> Tensor:
        """Return the table in `dtype`, (V, D)."""
        return self.weight.to(self.dtype or self.weight.dtype)
