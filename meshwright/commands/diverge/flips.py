"""Finds the flipped bit with which a step comes out as the record has it, by trying.

The record of a step has sums of all bits of weights and optimizer state, so a match is a proof.
"""

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.commands.diverge.checkpoints import GRADIENT, Element
from meshwright.commands.diverge.records import compare_rows
from meshwright.commands.replay.job import StepFigures, figures_of
from meshwright.metrics.report.run import Row
from meshwright.models.loss import Batch
from meshwright.parallelisms.shards import local_box, local_shard
from meshwright.train.fingerprints import WHOLE_NUMBERS
from meshwright.train.running_job import RunningJob

MOST_S = 30.0
"""Seconds of all tries."""

BITS_TRIED = {GRADIENT: 8}
"""Of an element, those first that explain how far it is off later. An optimizer takes in about a
twentieth of a gradient, so more bits come into question."""

OTHER_BITS_TRIED = 3
"""Of a weight or of optimizer state."""

SHARE_OF_GRADIENT = 0.05


class Flip(NamedTuple):
    """A bit that explains a step."""

    element: Element
    bit: int


def find_flip(
    job: RunningJob,
    step: int,
    batches: list[Batch],
    elements: Sequence[Element],
    rows: Sequence[Row],
) -> Flip | None:
    """Return the flip with which a step has the bits of one of two records, of which the other has
    the bits without it. Collective.

    Args:
        job: before the step, where it is again afterwards.
        elements: to flip bits of.
        rows: of the records.
    """
    reset, gradients = _saved_state(job), dict[Element, float]()

    def read() -> None:
        gradients.update({e: _read(job, e) for e in elements if e.value == GRADIENT})

    _take(job, step, batches, read)
    reset()
    begin = time.monotonic()
    row = _take(job, step, batches, None)
    reset()
    wanted = [one for one in rows if "weights" in one and compare_rows(row, one, row["groups"])]
    if len(wanted) != 1:
        return None
    seconds = _sum(job, time.monotonic() - begin, dist.ReduceOp.MAX)
    values = {e: gradients[e] if e in gradients else _read(job, e) for e in elements}
    ranked = [(n, e, bit) for e in elements for n, bit in enumerate(likely_bits(e, values[e]))]
    ranked.sort(key=lambda one: one[0])  # the most likely bits of all elements first
    for _, element, bit in ranked[: int(MOST_S / seconds)]:

        def flip(element: Element = element, bit: int = bit) -> None:
            found = _element(job, element)
            if found is not None:
                found.view(WHOLE_NUMBERS[found.element_size()]).bitwise_xor_(_mask(found, bit))

        if element.value != GRADIENT:
            flip()
        row = _take(job, step, batches, flip if element.value == GRADIENT else None)
        reset()
        if not compare_rows(row, wanted[0], row["groups"]):
            return Flip(element, bit)
    return None


def _take(job: RunningJob, step: int, batches: list[Batch], call: Callable[[], None] | None) -> Row:
    """Take the step, and return its line as a record has it.

    Args:
        call: when gradients are there and not yet clipped.
    """
    trainer = job.trainer
    sound = trainer.forward_backward

    def watched(*args: Any) -> Tensor:
        loss = sound(*args)
        if call is not None:
            call()
        return loss

    trainer.forward_backward = watched  # type: ignore[method-assign,assignment]
    try:
        # a try isn't a step of the run: a copy learns from it, and stops after it
        return row_of(job, figures_of(step, trainer.step(step, batches, deepcopy(job.detector))))
    finally:
        del trainer.forward_backward


def row_of(job: RunningJob, figures: StepFigures) -> Row:
    """Return a step that was just taken as a record has it, and the names of groups. Collective."""
    record = job.step_record
    found = asdict(figures) | {"norms": [*figures.norms], "groups": record.groups}
    return found | record.fingerprints()


def likely_bits(element: Element, value: float) -> list[int]:
    """Return bits of an element, those first that change it by as much as it was off later."""
    before = torch.tensor([value], dtype=torch.float32)
    share = SHARE_OF_GRADIENT if element.value == GRADIENT else 1.0

    def unlikeliness(bit: int) -> float:
        after = (before.view(torch.int32) ^ _mask(before, bit)).view(torch.float32)
        change = abs(float(after.double() - before.double())) * share
        if math.isfinite(change) and math.isfinite(element.distance) and change > 0:
            return abs(math.log2(change / element.distance))
        return float("inf") if math.isfinite(element.distance) else -bit

    return sorted(range(32), key=unlikeliness)[: BITS_TRIED.get(element.value, OTHER_BITS_TRIED)]


def _mask(element: Tensor, bit: int) -> Tensor:
    mask = torch.tensor([1 << bit]) - (1 << 32 if bit == 31 else 0)
    return mask.to(element.device, WHOLE_NUMBERS[element.dtype.itemsize])


def _element(job: RunningJob, element: Element) -> Tensor | None:
    """Return a view of the element, (1,), on the rank that is suspected; None on others."""
    parameter = dict(job.trainer.model.named_parameters()).get(element.parameter)
    if dist.get_rank() != element.rank or parameter is None:
        return None
    value: Tensor | None = parameter.detach()
    if element.value == GRADIENT:
        value = parameter.grad
    elif element.value != "weight":
        value = job.trainer.optimizer.state[parameter].get(element.value)
    if value is None:
        return None
    local, offset = local_box(value)
    inside = [i - begin for i, begin in zip(element.index, offset, strict=True)]
    if not all(0 <= i < size for i, size in zip(inside, local.shape, strict=True)):
        return None
    for i in inside[:-1]:
        local = local[i]
    return local[inside[-1] : inside[-1] + 1]


def _read(job: RunningJob, element: Element) -> float:
    """Return the value of an element on every rank. Collective."""
    found = _element(job, element)
    return _sum(job, 0.0 if found is None else float(found))


def _sum(job: RunningJob, value: float, op: Any = dist.ReduceOp.SUM) -> float:
    device = torch.device(job.trainer.meshes.world.device_type)
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total, op)
    return float(total)


def _saved_state(job: RunningJob) -> Callable[[], None]:
    """Return a function that puts weights, buffers and optimizer state back as they are now."""
    held = [buffer for stage in job.trainer.model.stages for buffer in stage.buffers()]
    for _, parameter in job.trainer.model.named_parameters():
        of_state = job.trainer.optimizer.state.get(parameter, {}).values()
        held += [parameter, *(value for value in of_state if isinstance(value, Tensor))]
    shards = [local_shard(one.detach()) for one in held]
    kept = [shard.clone() for shard in shards]

    def reset() -> None:
        for shard, value in zip(shards, kept, strict=True):
            shard.copy_(value)

    return reset
