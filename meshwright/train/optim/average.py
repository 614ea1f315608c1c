"""The EMA of the weights, for `checkpoint.average`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.metrics.observers import Evaluate, Observer
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.shards import local_shard


class Average(Observer):
    """An exponential moving average of every parameter, in fp32, in its layout and place. `decay`
    is the share of the mean that an update keeps."""

    def __init__(self, model: LocalModel, decay: float) -> None:
        self._model, self._decay = model, decay
        self.tensors: dict[str, Tensor] = {
            name: torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            for name, parameter in model.named_parameters()
        }
        """By the parameters' names; arbitrary until `begin`, or a load."""

    def _shards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each mean, and of its weight."""
        for name, parameter in self._model.named_parameters():
            yield local_shard(self.tensors[name]), local_shard(parameter)

    @torch.no_grad()
    def begin(self) -> None:
        """Set the means to the weights."""
        for mean, weight in self._shards():
            mean.copy_(weight)

    @torch.no_grad()
    def after_update(self, skip_update: Tensor) -> None:
        """Take in the weights after a step; not if that was held back: () bool, on its device."""
        for mean, weight in self._shards():
            taken = torch.where(skip_update.to(mean.device), mean, weight)
            # m + (t - m) share, the same bits for shards of any mesh. In fp32 two shares wouldn't
            # add up to 1: 0.99999 would shrink every mean by 0.1 %
            mean.lerp_(taken, 1 - self._decay)

    def on_validation(self, evaluate: Evaluate, is_stopped: Callable[[], bool]) -> dict[str, float]:
        """Evaluate the means as well."""
        with self.in_place():
            return {f"average/{name}": figure for name, figure in evaluate().items()}

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Within, the model has the means as its weights. For forwards without gradients."""
        kept, stages = [], self._model.stages
        reset_after_no_grad(stages)  # parameters that are still gathered would stay as they were
        for mean, weight in self._shards():
            kept.append(weight.clone())
            weight.copy_(mean)
        try:
            yield
        finally:
            reset_after_no_grad(stages)
            for (_, weight), before in zip(self._shards(), kept, strict=True):
                weight.copy_(before)
