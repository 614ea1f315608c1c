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
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel

from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.state import OPTIMIZER
from meshwright.datasets.stream import Cursor
from meshwright.models import decoder, loss, mixture
from meshwright.parallelisms import data_parallel
from meshwright.train import trainer
from meshwright.train.optim.average import Average
from meshwright.train.optim.optimizers import build_optimizer

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
def loss_in_bf16() -> Iterator[None]:
    """The logits are not cast to fp32 before the loss."""

    def low(logits):
        return logits.bfloat16().logsumexp(-1).float()

    with patch.object(loss, "_log_sums_in_blocks", low):
        yield


@fault
def another_epsilon() -> Iterator[None]:
    """The optimizer has its own, a hundred times as large: only small gradients feel it."""

    def build(parameters, config, *others):
        return build_optimizer(parameters, config.model_copy(update={"eps": 1e-6}), *others)

    with patch.object(trainer, "build_optimizer", build):
        yield


@fault
def weights_kept_in_bf16() -> Iterator[None]:
    """What a step adds to a weight is lost where it is less than half a bit of bf16."""
    real = trainer.train_step

    def step(model, *args, **options):
        result = real(model, *args, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return result

    with patch.object(trainer, "train_step", step):
        yield


@fault
def validation_of_own_samples() -> Iterator[None]:
    """Its figures are this rank's, not those of all."""
    with patch("meshwright.train.validation.dist", SimpleNamespace(all_reduce=lambda tensor: None)):
        yield


@fault
def a_token_goes_to_its_worst_expert() -> Iterator[None]:
    """Of one token the last of its experts, once on rank 0: fewer than 1 of 10,000."""
    real, is_due = mixture.choose_experts, torch.distributed.get_rank() == 0

    def choose(scores, *options):
        nonlocal is_due
        choice = real(scores, *options)
        if is_due and torch.is_grad_enabled():
            is_due, choice[0, -1] = False, scores[0].argmin()
        return choice

    with patch.object(mixture, "choose_experts", choose):
        yield


@fault
def mean_of_first_stage_alone() -> Iterator[None]:
    """The running means of other stages of a pipeline stay as they began."""
    real = Average.update

    def update(self, is_held_back):
        if self._model.stages[0].tok_embeddings is not None:
            real(self, is_held_back)

    with patch.object(Average, "update", update):
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
def rows_saved_in_another_order() -> Iterator[None]:
    """A checkpoint that the same mesh would load as it was, and another one would not."""

    def turn(tensors):
        return {k: _turned(t) if isinstance(t, DTensor) else t for k, t in tensors.items()}

    with _saved(turn):
        yield


@fault
def a_tensor_not_saved() -> Iterator[None]:
    """A moment of one parameter."""
    with _saved(lambda tensors: {k: t for k, t in tensors.items() if k != MOMENT}):
        yield


MOMENT = f"{OPTIMIZER}state.layers.1.attention.wq.weight.exp_avg"


@contextmanager
def _saved(change: Callable[[dict], dict]) -> Iterator[None]:
    """Checkpoints hold what `change` makes of their tensors."""
    real = CheckpointManager.save

    def save(self, step, state, manifest, is_last):
        changed = SimpleNamespace(state_dict=lambda: change(state.state_dict()))
        real(self, step, changed, manifest, is_last)

    with patch.object(CheckpointManager, "save", save):
        yield


def _turned(tensor: DTensor) -> DTensor:
    """With the first half of its rows behind the second."""
    whole = tensor.full_tensor()
    return distribute_tensor(whole.roll(len(whole) // 2, 0), tensor.device_mesh, tensor.placements)


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
