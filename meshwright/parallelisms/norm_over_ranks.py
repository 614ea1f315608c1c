"""RMS norm of vectors that tensor parallelism has cut."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class NormOverRanks(nn.Module):
    """An RMS norm of vectors of which each rank has a part, (B, S, W/tp).

    Ranks add up their sums of squares, one number per token, forward and backward; the gradient of
    a rank's weights needs no other rank.
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self.weight = nn.Parameter(distribute_tensor(norm.weight, mesh, [Shard(0)]))
        self.eps, self.width, self.mesh = norm.eps, norm.weight.numel(), mesh

    def forward(self, x: Tensor) -> Tensor:  # (B, S, W/tp) -> (B, S, W/tp)
        wide = x.float()
        own = wide.square().sum(-1, keepdim=True)
        every = DTensor.from_local(own, self.mesh, [Partial()]).redistribute(
            placements=[Replicate()]
        )
        # each rank uses the sum for its own part, so its gradient is one of the terms of the whole
        square_sum = every.to_local(grad_placements=[Partial()])  # (B, S, 1)
        scale = torch.rsqrt(square_sum / self.width + self.eps)
        weight = cast(DTensor, self.weight).to_local()
        return (wide * scale * weight.float()).type_as(x)
