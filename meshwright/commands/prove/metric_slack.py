"""How far rounding may move the metrics of the user's module, whose sums may nearly cancel."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshwright.models.loss import Batch
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.train.own_metrics import OwnMetrics, Shard, StepParts, parts_of

PIECES = 8
"""Of each parameter, by rows, as shards are."""

STEP = 1e-3
"""Of the sums' sizes, by which sums are moved to see what becomes of the result."""


class WatchedMetrics(OwnMetrics):
    """The metrics of a job on one process, and how much a relative error of summands moves them.

    Rounding is relative to what is added up, not to the sum. The size of the summands is that of
    the sums over pieces of the step, which ranks might hold.

    Attributes:
        slack: by name, of the last step: the size of the result's error over the relative error of
            the summands. Integers have none.
    """

    def __init__(self, own: OwnMetrics) -> None:
        self._metrics = own._metrics
        self._sizes: list[Tensor] = []
        self.slack: dict[str, float] = {}

    @torch.no_grad()
    def measure(
        self, model: LocalModel, batches: Sequence[Batch], meshes: Meshes, device: torch.device
    ) -> list[Tensor]:
        sums = super().measure(model, batches, meshes, device)
        self._sizes = [one.abs().zero_() for one in sums]
        for piece in _pieces(parts_of(model, batches, meshes)) if sums else ():
            for size, (metric, options) in zip(self._sizes, self._metrics.values(), strict=True):
                size += metric.measure(piece, options).to(device).abs()
        return sums

    @torch.no_grad()
    def results(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        found = super().results(sums)
        self.slack = dict.fromkeys(found, 0.0)
        for (name, (metric, options)), own, size in zip(
            self._metrics.items(), sums, self._sizes, strict=True
        ):
            for place in range(len(own)) if own.is_floating_point() else ():
                moved = own.clone()
                moved[place] += STEP * size[place]
                change = abs(float(metric.result(moved, options)) - float(found[name])) / STEP
                self.slack[name] += change if change < torch.inf else 0.0
        return found


def _pieces(parts: StepParts) -> Iterator[StepParts]:
    for name, weight, gradient in parts.shards:
        rows = min(PIECES, len(weight))
        for own, of_own in zip(weight.chunk(rows), gradient.chunk(rows), strict=True):
            yield StepParts([Shard(name, own, of_own)], ())
    for batch in parts.batches:
        yield StepParts((), [batch])
