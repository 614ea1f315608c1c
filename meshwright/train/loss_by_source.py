"""The training loss of a step by source, for mixtures: on any mesh the same, but for rounding."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.loss import Batch, has_loss
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes


class LossBySource:
    """Adds up the losses of a step by the source of each sequence, where the last stage is.

    It listens to the model's loss, which computes the loss of every token anyway. Microbatches come
    there in their order, with a pipeline as well.

    Args:
        names: of the sources, in the order of their numbers in `Batch.sources`.
    """

    def __init__(
        self, model: LocalModel, names: Sequence[str], meshes: Meshes, device: torch.device
    ) -> None:
        self._names = names
        self._waiting = deque[Tensor]()
        # losses and labels: fp64 counts exactly up to 2^53
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=device)
        for stage in model.stages:
            # ranks of a tp group have the same losses
            if stage.output is not None and meshes.tp.get_local_rank() == 0:
                stage.output.loss.listen = self._add

    def begin(self, batches: Sequence[Batch]) -> None:
        """Forget the step before; these microbatches follow."""
        self._waiting = deque(batch.sources for batch in batches if batch.sources is not None)
        self._sums.zero_()

    def _add(self, losses: Tensor, labels: Tensor) -> None:
        """Add those of a microbatch, (B, S/cp) each; of a validation's none."""
        if self._waiting:
            of_sequences = torch.stack([losses.double().sum(1), has_loss(labels).sum(1).double()])
            sources = F.one_hot(self._waiting.popleft(), len(self._names))  # (B, sources)
            # no `index_add_`: on GPUs its order changes from run to run
            self._sums += of_sequences @ sources.double()

    def figures(self) -> dict[str, float]:
        """Return the mean loss of each source that had labels in the step. Collective."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        pairs = zip(self._names, *sums.tolist(), strict=True)
        return {f"loss/train/{name}": loss / count for name, loss, count in pairs if count}
