"""Mistakes that parallel training has been known to make, each planted while a function runs."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel

from meshwright.datasets.loader import Loader
from meshwright.loss import token_loss
from meshwright.models import initialize
from meshwright.parallelisms import data_parallel, tensor_parallel


@contextmanager
def gradients_times_eight() -> Iterator[None]:
    """The factor of a mean over 8 ranks, forgotten."""

    def scale(model) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / 8)
                module.set_force_sum_reduction_for_comms(True)

    with patch.object(data_parallel, "sum_gradients", scale):
        yield


@contextmanager
def no_sum_over_tp() -> Iterator[None]:
    """Row-wise products keep this rank's part of the sum."""

    real = RowwiseParallel._prepare_output_fn

    def keep_own(output_layouts, use_local_output, module, outputs, mesh):
        if not isinstance(module, nn.Linear):  # the embedding
            return real(output_layouts, use_local_output, module, outputs, mesh)
        return outputs.to_local().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]

    with patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(keep_own)):
        yield


@contextmanager
def same_values_on_every_tp_rank() -> Iterator[None]:
    """Each rank fills its shard as if it held the first."""
    real = initialize.local_box

    def at_the_start(parameter):
        local, offset = real(parameter)
        return local, (0,) * len(offset)

    with patch.object(initialize, "local_box", at_the_start):
        yield


@contextmanager
def norm_gradients_of_own_tokens() -> Iterator[None]:
    """Norms on a part of the sequence, whose weights get the gradient of that part alone."""

    class Forgetful(SequenceParallel):
        def _apply(self, module, mesh):
            module = super()._apply(module, mesh)
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
            # to_local takes the gradient for the same on every rank, as the weight is
            module.forward = lambda x: F.rms_norm(
                x, x.shape[-1:], module.weight.to_local(), module.eps
            )
            return module

    with patch.object(tensor_parallel, "SequenceParallel", Forgetful):
        yield


@contextmanager
def swapped_microbatches() -> Iterator[None]:
    """The same samples in another order."""
    real = Loader._next_step

    def swapped(self):
        step = real(self)
        return dataclasses.replace(step, batches=step.batches[::-1])

    with patch.object(Loader, "_next_step", swapped):
        yield


@contextmanager
def labels_shifted_after_the_cut() -> Iterator[None]:
    """The label of a chunk's last token is the next token of this rank, not of the sequence."""

    def shifted(logits, labels, num_labels):
        labels = labels.clone()
        middle = labels.shape[1] // 2
        labels[:, middle - 1] = labels[:, middle]
        return token_loss(logits, labels, num_labels)

    with patch("meshwright.step.token_loss", shifted):
        yield


@contextmanager
def loss_times(factor: float) -> Iterator[None]:
    """The loss of this rank's samples, and so their gradient, many times as large, or not finite.

    Not one of `FAULTS`: it is for a single step.
    """

    def scaled(logits, labels, num_labels):
        return factor * token_loss(logits, labels, num_labels)

    with patch("meshwright.step.token_loss", scaled):
        yield


@contextmanager
def none() -> Iterator[None]:
    """All as it should be."""
    yield


FAULTS: dict[str, Callable[[], object]] = {
    fault.__name__: fault
    for fault in (
        none,
        gradients_times_eight,
        no_sum_over_tp,
        same_values_on_every_tp_rank,
        norm_gradients_of_own_tokens,
        swapped_microbatches,
        labels_shifted_after_the_cut,
    )
}
