"""Mistakes that parallel training has been known to make, each planted while a function runs.

They are planted in ranks that live on, so a case takes a second or two. `tests/faults` has many
more, each in a copy of the package.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor.parallel import RowwiseParallel

from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.state import OPTIMIZER
from meshwright.datasets.stream import Cursor
from meshwright.models import decoder, loss
from meshwright.parallelisms import data_parallel

FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def fault(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Make a fault of a generator; `FAULTS` has it by its name."""
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


@fault
def gradients_times_eight() -> Iterator[None]:
    """The factor of a mean over 8 ranks, forgotten."""

    def scale(model) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / 8)
                module.set_force_sum_reduction_for_comms(True)

    with patch.object(data_parallel, "sum_gradients", scale):
        yield


@fault
def no_sum_over_tp() -> Iterator[None]:
    """Row-wise products keep this rank's part of the sum."""

    real = RowwiseParallel._prepare_output_fn

    def keep_own(output_layouts, use_local_output, module, outputs, mesh):
        if not isinstance(module, nn.Linear):  # the embedding
            return real(output_layouts, use_local_output, module, outputs, mesh)
        return outputs.to_local().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]

    with patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(keep_own)):
        yield


@fault
def sums_over_tp_in_bf16() -> Iterator[None]:
    """FSDP2 sums gradients of norms over tp in the type they were computed in (pytorch 190626)."""
    as_computed = property(lambda parameter: parameter.param_dtype)
    with (
        patch.object(data_parallel, "sum_over_tp_in_reduce_dtype", lambda model: None),
        # torch 2.15 has no such fault by itself; older ones don't read this
        patch.object(FSDPParam, "unsharded_grad_dtype", as_computed, create=True),
    ):
        yield


@fault
def loss_in_bf16() -> Iterator[None]:
    """The logits are not cast to fp32 before the loss."""

    def low(logits):
        return logits.bfloat16().logsumexp(-1).float()

    with patch.object(loss, "_log_sums_in_blocks", low):
        yield


@fault
def validation_of_own_samples() -> Iterator[None]:
    """Its figures are this rank's, not those of all."""
    with patch("meshwright.train.validation.dist", SimpleNamespace(all_reduce=lambda tensor: None)):
        yield


@fault
def resume_a_batch_late() -> Iterator[None]:
    """The cursor is that of the batch after."""
    real = Cursor.from_json

    def late(value):
        cursor = real(value)
        return dataclasses.replace(cursor, sample=cursor.sample + 8, counts=(cursor.counts[0] + 8,))

    with patch.object(Cursor, "from_json", late):
        yield


@fault
def a_tensor_not_saved() -> Iterator[None]:
    """A moment of one parameter."""
    real = CheckpointManager.save

    def save(self, step, state, manifest, is_last):
        kept = {name: tensor for name, tensor in state.state_dict().items() if name != MOMENT}
        real(self, step, SimpleNamespace(state_dict=lambda: kept), manifest, is_last)

    with patch.object(CheckpointManager, "save", save):
        yield


MOMENT = f"{OPTIMIZER}state.layers.1.attention.wq.weight.exp_avg"


@contextmanager
def loss_times(factor: float) -> Iterator[None]:
    """The loss of this rank's samples, and so their gradient, many times as large, or not finite.

    Not one of `FAULTS`: it is for a single step.
    """
    real = decoder.Decoder.forward

    def forward(self, tokens, labels=None, **named):
        result = real(self, tokens, labels, **named)
        is_loss = labels is not None and self.output is not None and torch.is_grad_enabled()
        return factor * result if is_loss else result

    with patch.object(decoder.Decoder, "forward", forward):
        yield


@fault
def none() -> Iterator[None]:
    """All as it should be."""
    yield
