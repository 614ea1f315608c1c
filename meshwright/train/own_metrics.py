"""Measures the metrics of the user's module: this rank's part of a step, each element once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.models.loss import Batch
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import is_dtensor, local_shard
from meshwright.train.metric_table import METRICS, Metric


class Shard(NamedTuple):
    """This rank's part of a parameter and of its gradient, before clipping."""

    name: str
    weight: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class StepParts:
    """What a metric may look at, before the update. Over all ranks of the job each element of the
    model, and each token of the global batch, is there exactly once."""

    shards: Sequence[Shard]
    """Of parameters that have a gradient."""
    batches: Sequence[Batch]
    """Microbatches with tokens and labels (B, S/cp); none where another rank has the same."""


def parts_of(model: LocalModel, batches: Sequence[Batch], meshes: Meshes) -> StepParts:
    """Return this rank's part of a step, after backward."""
    is_first = meshes.tp.get_local_rank() == 0 and meshes.pp.get_local_rank() == 0
    return StepParts([*_own_shards(model)], batches if is_first else ())


def _own_shards(model: LocalModel) -> Iterator[Shard]:
    for name, parameter in model.named_parameters_once():
        gradient = parameter.grad
        if gradient is None:
            continue
        if is_dtensor(gradient):
            mesh, placements = gradient.device_mesh, gradient.placements
            if any(p.is_replicate() and mesh.get_local_rank(i) for i, p in enumerate(placements)):
                continue  # the first of the ranks that have the same gives it
        yield Shard(name, local_shard(parameter.detach()), local_shard(gradient))


class OwnMetrics:
    """The metrics of a job.

    Args:
        options: of the user's module, by name.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._metrics: dict[str, tuple[Metric, Any]] = {
            name: (metric, options.get(name)) for name, metric in METRICS.items()
        }

    @torch.no_grad()
    def measure(
        self, model: LocalModel, batches: Sequence[Batch], meshes: Meshes, device: torch.device
    ) -> list[Tensor]:
        """Return this rank's summands of each metric, (K,) on `device`."""
        if not self._metrics:
            return []
        parts = parts_of(model, batches, meshes)
        return [one.measure(parts, own).to(device) for one, own in self._metrics.values()]

    @torch.no_grad()
    def results(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the metrics by name, from the sums over all ranks."""
        return {
            name: metric.result(own_sums, options)
            for (name, (metric, options)), own_sums in zip(self._metrics.items(), sums, strict=True)
        }


LIMB_BITS, LIMBS = 12, 6
"""fp32 adds up 4096 numbers below 2^12 exactly, so int64 travels as six of them."""


def to_limbs(integers: Tensor) -> Tensor:
    """(...) int64 -> (..., 6) fp32, the last of which has the sign."""
    shifts = torch.arange(LIMBS, device=integers.device) * LIMB_BITS
    limbs = integers.unsqueeze(-1) >> shifts  # an arithmetic shift
    limbs[..., :-1] &= (1 << LIMB_BITS) - 1
    return limbs.float()


def from_limbs(limbs: Tensor) -> Tensor:
    """(..., 6) fp32, which may be sums over ranks -> (...) int64."""
    shifts = torch.arange(LIMBS, device=limbs.device) * LIMB_BITS
    return (limbs.long() << shifts).sum(-1)
