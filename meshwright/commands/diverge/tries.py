"""Takes steps of a job, or their updates, again and again from one state."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.commands.diverge.checkpoints import GRADIENT, NORM, WEIGHT, Place
from meshwright.commands.diverge.records import compare_rows
from meshwright.commands.replay.job import row_of
from meshwright.metrics.report.run import Row
from meshwright.models.loss import Batch
from meshwright.models.parameter import block_of
from meshwright.parallelisms.shards import local_box, local_shard
from meshwright.train import trainer as trainer_module
from meshwright.train.fingerprints import WHOLE_NUMBERS, local_sums
from meshwright.train.optim.gradients import divisor_to_clip
from meshwright.train.optim.update import set_learning_rate, update
from meshwright.train.running_job import RunningJob

SUM_KEYS = ("weights", "optimizer")
"""In a record, the sums of bits of each group of parameters."""


class Flip(NamedTuple):
    """A flipped bit."""

    place: Place
    bit: int
    is_early: bool = False
    """Before the forward, not before the update."""
    size: float = 0.0
    """How far the element is off later, over the root mean square of its tensor's differences."""


class Gradients(NamedTuple):
    """Of a step without a flip."""

    squares: Tensor
    """() fp32: the sum of their squares over all ranks."""
    tensors: Mapping[str, tuple[Tensor, Tensor]]
    """By parameter, with a copy of this rank's shard, for an update may change it."""


class Tries:
    """Steps of a job, from the state that it has now.

    Attributes:
        job: the job.
        parameters: of this rank, by name.
        groups: the names of groups of parameters.
        sound: the gradients of steps that were taken without a flip.

    Args:
        batches: of the steps.
    """

    def __init__(self, job: RunningJob, batches: Mapping[int, list[Batch]]) -> None:
        self.job, self._batches, self._optimizer = job, batches, job.trainer.optimizer
        self.parameters: dict[str, nn.Parameter] = dict(job.trainer.model.named_parameters())
        self.groups, self.sound = job.step_record.groups, dict[int, Gradients]()
        held = [buffer for stage in job.trainer.model.stages for buffer in stage.buffers()]
        for parameter in self.parameters.values():
            state = self._optimizer.state.get(parameter, {}).values()
            held += [parameter, *(value for value in state if isinstance(value, Tensor))]
        shards = [local_shard(one.detach()) for one in held]
        self._kept = [(shard, shard.clone()) for shard in shards]

    def reset(self) -> None:
        """Go back to the first state."""
        for shard, value in self._kept:
            shard.copy_(value)

    def take(self, steps: Sequence[int], flip: Flip | None, wanted: Mapping[int, Row]) -> list[Row]:
        """Return lines of steps as a record has them, up to the first that isn't as wanted. Leaves
        the state as it was. Collective.

        Args:
            flip: in the first of the steps; None: keep the gradients of all.
        """
        # a try isn't a step of the run: a copy learns from it, and stops after it
        detector, rows = deepcopy(self.job.detector), list[Row]()

        def at_gradients() -> None:
            if not rows and flip is not None and not flip.is_early:
                self._flip(flip)

        def at_sums(squares: Tensor) -> None:
            if flip is None:
                self.sound[steps[len(rows)]] = Gradients(squares[0].clone(), self._gradients())
            elif not rows and flip.place.value == NORM and flip.place.rank == dist.get_rank():
                flip_bits(squares[:1], flip.bit)

        if flip is not None and flip.is_early:
            self._flip(flip)
        with _watched(self.job.trainer, at_gradients, at_sums):
            for step in steps:
                result = self.job.trainer.step(step, self._batches[step], detector)
                row = row_of(step, result) | self.job.step_record.fingerprints()
                is_other = bool(compare_rows(row, wanted.get(step, row), self.groups))
                # the first rank has written the record: others may have a different norm
                if self.total(float(is_other and dist.get_rank() == 0)):
                    break
                rows.append(row)
        self.reset()
        return rows

    def _gradients(self) -> dict[str, tuple[Tensor, Tensor]]:
        all_of_them = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {n: (g, local_shard(g).clone()) for n, g in all_of_them.items() if g is not None}

    def update(
        self, step: int, norm: Tensor, group: str = "", value: str = "", bit: int = 0
    ) -> None:
        """Update with the gradients that a step has without a flip.

        Args:
            norm: () fp32, that they are clipped by.
            group: of parameters, the only one to update; empty: all.
            value: of which a bit is flipped in every element before; empty: of none.
        """
        trainer = self.job.trainer
        set_learning_rate(self._optimizer, trainer.lr_at(step))
        for name, (gradient, copy) in self.sound[step].tensors.items():
            local_shard(gradient).copy_(copy)
            is_in = group in ("", block_of(name))
            self.parameters[name].grad = gradient if is_in else None
            if is_in and (tensor := self.values(name).get(value)) is not None:
                flip_bits(tensor, bit)
        is_clipped = math.isfinite(trainer.max_norm)
        divisor = divisor_to_clip(norm, trainer.max_norm) if is_clipped else None
        update(self._optimizer, torch.tensor(False, device=norm.device), divisor)
        self._optimizer.zero_grad()

    def values(self, name: str) -> dict[str, Tensor]:
        """Return this rank's shards of the weight, the gradient and the state of a parameter,
        without counts of steps and without state of full matrices."""
        parameter = self.parameters[name]
        found: dict[str, Any] = {WEIGHT: parameter.detach(), GRADIENT: parameter.grad}
        found |= self._optimizer.state.get(parameter, {})
        shards = {key: local_shard(one) for key, one in found.items() if isinstance(one, Tensor)}
        return {key: one for key, one in shards.items() if one.shape == shards[WEIGHT].shape}

    def element(self, place: Place) -> Tensor | None:
        """Return a view of an element, (1,), on the rank that has it; None on others."""
        if dist.get_rank() != place.rank or place.parameter not in self.parameters:
            return None
        tensor = self.values(place.parameter).get(place.value)
        _, offset = local_box(self.parameters[place.parameter])
        inside = [i - begin for i, begin in zip(place.index, offset, strict=True)]
        if tensor is None or not all(0 <= i < n for i, n in zip(inside, tensor.shape, strict=True)):
            return None
        for i in inside[:-1]:
            tensor = tensor[i]
        return tensor[inside[-1] : inside[-1] + 1]

    def _flip(self, flip: Flip) -> None:
        if (element := self.element(flip.place)) is not None:
            flip_bits(element, flip.bit)

    def sums(self) -> Tensor:
        """Return this rank's share of the sums of bits of weights and state: (2, G)."""
        parameters = self.job.trainer.model.named_parameters_once()
        return local_sums(parameters, self._optimizer.state, self.groups, self.job.device)

    def off(self, wanted: Row, sums: Tensor) -> Tensor:
        """Return what is missing in the sums of all ranks: (2, G). Collective."""
        dist.all_reduce(total := sums.clone())
        # sums wrap around at 2^64, and int64 has a sign
        rows = [[(int(n, 16) + 2**63) % 2**64 - 2**63 for n in wanted[key]] for key in SUM_KEYS]
        return torch.tensor(rows).to(total) - total

    def total(self, value: float) -> float:
        """Return the sum over all ranks. Collective."""
        total = torch.tensor([value], dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        return float(total)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element as a whole number, int64."""
    return tensor.view(WHOLE_NUMBERS[tensor.dtype.itemsize]).long()


def flip_bits(tensor: Tensor, bit: int) -> None:
    """Flip a bit in every element; nothing if they have less."""
    size = tensor.dtype.itemsize
    if bit < 8 * size:
        # the highest is the sign
        mask = 1 << bit if bit < 8 * size - 1 or size == 1 else -(1 << bit)
        tensor.view(WHOLE_NUMBERS[size]).bitwise_xor_(mask)


@contextmanager
def _watched(
    trainer: trainer_module.Trainer,
    at_gradients: Callable[[], None],
    at_sums: Callable[[Tensor], None],
) -> Iterator[None]:
    """Call functions when the gradients of a step are there, and with the sums of their squares."""
    forward_backward, summed = trainer.forward_backward, trainer_module.summed

    def and_gradients(*args: Any) -> Tensor:
        loss = forward_backward(*args)
        at_gradients()
        return loss

    def and_sums(*parts: Tensor) -> list[Tensor]:
        sums = summed(*parts)
        at_sums(sums[1])
        return sums

    trainer.forward_backward = and_gradients  # type: ignore[method-assign,assignment]
    trainer_module.summed = and_sums
    try:
        yield
    finally:
        del trainer.forward_backward
        trainer_module.summed = summed
