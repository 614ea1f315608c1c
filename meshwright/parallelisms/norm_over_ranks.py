"""RMS norm of vectors that tensor parallelism has cut."""

import functools
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.parallelisms.all_gather import all_gather


class NormOverRanks(nn.Module):
    """An RMS norm of vectors of which each rank has a part, (B, S, W/tp).

    Ranks exchange their sums of squares, one number per token and rank, forward and backward. The
    gradient of a rank's part of the weight needs no other rank.
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self.weight = nn.Parameter(distribute_tensor(norm.weight, mesh, [Shard(0)]))
        self.eps, self.width, self.mesh = norm.eps, norm.weight.numel(), mesh

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, W/tp) -> (B, S, W/tp)."""
        wide = x.float()
        own = wide.square().sum(-1, keepdim=True).unsqueeze(0)  # (1, B, S, 1)
        # gathered and added up here, not summed by DTensor: up to torch 2.11 its backward would
        # leave out the other ranks' gradients of the sum. One by one, since the gradient of `sum`
        # is expanded, and torch 2.11 sends only dense tensors.
        square_sum = functools.reduce(torch.add, all_gather(own, self.mesh).unbind(0))
        weight = cast(DTensor, self.weight).to_local()
        return (wide * torch.rsqrt(square_sum / self.width + self.eps) * weight).type_as(x)
