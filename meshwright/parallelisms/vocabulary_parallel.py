"""The output projection and its loss where each rank has a part of the vocabulary."""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.models.layers.loss import SummedLoss, rows_at
from meshwright.parallelisms.all_gather import all_gather


class VocabularyParallelLoss(SummedLoss):
    """A loss of which each rank computes the logits of its own rows of the weight.

    Ranks exchange two numbers per token: the log of their sum of exponentials, and the label's
    logit. Each then has the whole loss, and its part of the gradients. Collective over `mesh`.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def logits(self, x: Tensor, weight: Tensor, at: Tensor | None = None) -> Tensor:
        """(B, S/tp, D), a weight cut along the vocabulary -> (B, S, V), the same on every rank.

        Args:
            at: (B,) positions in the whole sequences, as `SummedLoss.logits` takes them.
        """
        x, own = rows_at(self._gathered(x), at), cast(DTensor, weight).to_local()
        shape = torch.Size((*x.shape[:2], weight.shape[0]))
        strides = (shape[1] * shape[2], shape[2], 1)
        logits = DTensor.from_local(
            super().logits(x, own), self.mesh, [Shard(2)], shape=shape, stride=strides
        )
        return logits.redistribute(placements=[Replicate()]).to_local().contiguous()

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """(B, S/tp, D), a weight cut along the vocabulary, (B, S) -> () fp32."""
        rows_per_rank = -(-weight.shape[0] // self.mesh.size())  # as `Shard` cuts
        first = min(self.mesh.get_local_rank() * rows_per_rank, weight.shape[0])
        own = cast(DTensor, weight).to_local()
        chunk_tokens = self.tokens_per_chunk(weight, x.dtype)
        x = self._gathered(x)
        return self.of_rows(x, own, labels, chunk_tokens=chunk_tokens, first=first)

    def join(self, log_sum: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        both = all_gather(torch.stack([log_sum, own]).unsqueeze(0), self.mesh)  # (tp, 2, tokens)
        return both[:, 0].logsumexp(0), both[:, 1].amax(0)

    def _gathered(self, x: Tensor) -> Tensor:
        """(B, S/tp, D) -> (B, S, D), where a gradient is this rank's summand."""
        whole = DTensor.from_local(x, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])
