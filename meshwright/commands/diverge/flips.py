"""Finds the flipped bit with which a step comes out as the record has it.

The record of a step has sums of all bits of weights and optimizer state, by group of parameters. An
update of an element depends on no other element, but for the norm that gradients are clipped to.
So one update with the same bit flipped in every element shows by how much each of these flips
changes the sums. The few that change them as the record has it are then tried by themselves, in
this step and in those behind it.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.commands.diverge.checkpoints import (
    GRADIENT,
    NORM,
    WEIGHT,
    Element,
    Place,
    difference,
)
from meshwright.commands.diverge.records import compare_rows
from meshwright.commands.diverge.tries import Flip, Tries, bits_of, flip_bits
from meshwright.metrics.report.run import Row
from meshwright.models.loss import Batch
from meshwright.models.parameter import block_of
from meshwright.parallelisms.shards import is_dtensor, local_box, part_of_box
from meshwright.train.fingerprints import is_first_copy
from meshwright.train.running_job import RunningJob

SURE_TRIES, MOST_S = 16, 20.0
"""Tries that are made in any case, and seconds after which no more are made."""

MOST_PLACES = 64
"""Flips that a rank puts up for a try, those first whose element is furthest off later."""

BITS = range(32)

BITS_TRIED = 3
"""Of a weight before the forward, those first that explain how far it is off later."""

TIMES_CHANGE = 4.0
"""How many times the change by a flip an element may be off later, at most: an ulp of a number that
has grown is larger."""

TIMES_NEXT = 10.0
"""How many times as far off as all others an element must be if no step behind proves the flip."""


@dataclass(frozen=True)
class Known:
    """What two runs have left of the first step that differs, and of those behind it."""

    records: Sequence[Mapping[int, Row]]
    """Of each run, by step."""
    steps_behind: int
    """To take behind the first, in which a flip has to explain the record, too."""
    weights: Sequence[Element]
    """That may have been flipped before the forward."""
    saved: Sequence[str] = ()
    """Folders of a checkpoint behind the step, of each run; none, if there isn't one."""


def find_flips(job: RunningJob, batches: Mapping[int, list[Batch]], known: Known) -> list[Flip]:
    """Return the flips with which steps have the bits of one of two records, of which the other has
    the bits without them. All are of one element, for several bits may come to the same.
    Collective.

    Args:
        job: before the first step, where it is again afterwards. It has taken a step before.
        batches: of the first step, and of those behind it.
    """
    tries, steps = Tries(job, batches), list(batches)
    if not (alike := steps_alike(known.records, steps)):
        return []
    sound = tries.take(alike, None, {})[0]
    is_other = [bool(compare_rows(sound, rows[alike[0]], tries.groups)) for rows in known.records]
    if is_other[0] == is_other[1]:
        return []
    order = slice(None, None, 1 if is_other[1] else -1)
    ours, theirs = known.records[order]
    wanted = {step: theirs[step] for step in alike}
    flips = _before_update(tries, wanted, known.saved[order])
    # a step that begins with other weights is a proof, for every sum of it depends on them
    is_proof = ours[alike[-1]]["weights"] != theirs[alike[-1]]["weights"] and alike != steps
    if not (is_proof or stands_out(flips)):
        flips = []
    begin, found = time.monotonic(), list[Flip]()
    for number, flip in enumerate([*flips, *_of_weights(tries, known.weights)]):
        is_late = number >= SURE_TRIES and time.monotonic() > begin + MOST_S
        if tries.total(float(is_late)):
            break
        if found and found[0].place.element != flip.place.element:
            continue
        if len(tries.take(steps, flip, theirs)) == len(steps):
            found.append(flip)
    return found


def steps_alike(records: Sequence[Mapping[int, Row]], steps: Sequence[int]) -> list[int]:
    """Return the first of `steps`, as far as both runs begin them with the same weights and have
    recorded the sums behind them."""
    found = list[int]()
    for step in steps:
        ours, theirs = (rows.get(step, {}).get("weights") for rows in records)
        if ours is None or theirs is None:
            break
        found.append(step)
        if ours != theirs:
            break
    return found


def stands_out(flips: Sequence[Flip]) -> bool:
    """Return whether the first element is much further off than all others."""
    others = [flip.size for flip in flips if flip.place.element != flips[0].place.element]
    return not others or flips[0].size > TIMES_NEXT * others[0]


def _before_update(tries: Tries, wanted: Mapping[int, Row], saved: Sequence[str]) -> list[Flip]:
    """Return flips before the first update with which the steps have the sums that are wanted,
    those first whose element is furthest off later."""
    if tries.job.trainer.early is not None:  # gradients are gone when their norm is known
        return []
    found = sorted(_of_elements(tries, wanted, saved), key=lambda flip: -flip.size)
    everywhere: list[list[Flip]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, found[:MOST_PLACES])
    ranked = sorted(chain(*everywhere), key=lambda flip: -flip.size)
    return [*_of_norm(tries, *next(iter(wanted.items()))), *ranked]


def _of_norm(tries: Tries, step: int, wanted: Row) -> list[Flip]:
    """Return flips in the sum of the squares of all gradients, on one rank."""
    squares = tries.sound[step].squares
    tries.update(step, squares.sqrt())
    sound, moved = tries.sums(), list[Tensor]()
    for bit in BITS:
        flip_bits(changed := squares.clone(), bit)
        tries.reset()
        tries.update(step, changed.sqrt())
        moved.append(tries.sums() - sound)
    tries.reset()
    off, found = tries.off(wanted, sound), list[Flip]()
    everywhere = [torch.empty_like(sound) for _ in range(dist.get_world_size())]
    for bit, of_bit in zip(BITS, moved, strict=True):
        dist.all_gather(everywhere, of_bit)
        for rank, of_rank in enumerate(everywhere):
            if off.any() and torch.equal(of_rank, off):
                found.append(Flip(Place("", NORM, (), rank, has_replicas=False), bit))
    return found


def _of_elements(tries: Tries, wanted: Mapping[int, Row], saved: Sequence[str]) -> Iterator[Flip]:
    """Yield flips in this rank's weights, gradients and state."""
    if any(row["grad_norm"] is None for row in wanted.values()):
        return
    device, off = tries.job.device, list[Tensor]()
    norms = {step: torch.tensor(row["grad_norm"]).to(device) for step, row in wanted.items()}
    for step, row in wanted.items():
        tries.update(step, norms[step])
        off.append(tries.off(row, tries.sums()))
    tries.reset()
    is_off = torch.stack(off).flatten(0, 1).any(0).tolist()
    if sum(is_off) != 1:  # an element is of one group
        return
    group = tries.groups[is_off.index(True)]
    off = [of_step[:, is_off.index(True)] for of_step in off]
    names = [name for name in tries.sound[min(wanted)].tensors if block_of(name) == group]
    names = [name for name in names if is_first_copy(tries.parameters[name])]
    sound = list[Mapping[str, Values]]()
    for step in wanted:
        tries.update(step, norms[step], group)
        sound.append({name: _copies(tries.values(name)) for name in names})
    later_of = cache(lambda name, key: _later(tries, saved, name, key))
    # an update of full matrices is collective, so a rank without such state takes it, too
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, [GRADIENT, *chain(*sound[0].values())])
    for value, bit in product(dict.fromkeys(chain(*everywhere)), BITS):
        hits, changes = dict.fromkeys(names, torch.tensor(True)), dict[str, Values]()
        tries.reset()
        for number, step in enumerate(wanted):
            tries.update(step, norms[step], group, "" if number else value, bit)
            for name, hit in hits.items():
                before, after = sound[number][name], tries.values(name)
                hits[name] = hit & _has_moved(before, after, off[number])
                if not number and hits[name].any():
                    changes[name] = {k: after[k].double() - before[k].double() for k in before}
            hits = {name: hit for name, hit in hits.items() if hit.any()}
        for name, hit in hits.items():
            # a gradient is gone; what it leaves first is in the state
            key = [*changes[name], WEIGHT][1] if value == GRADIENT else value
            later = {k: later_of(name, k) for k in changes[name]} if saved else {}
            size = size_of(changes[name], later, key)
            yield from _flips_at(
                hit & ~size.isnan(), size, tries.parameters[name], name, value, bit
            )
    tries.reset()


Values = Mapping[str, Tensor]
"""Shards of the weight, first, and of each key of the optimizer's state."""


def _copies(values: Values) -> Values:
    return {key: value.clone() for key, value in values.items()}


def _has_moved(before: Values, after: Values, off: Tensor) -> Tensor:
    """Return where the bits of the weight, and of all state, are off by as much as `off` has."""
    moved = {key: bits_of(after[key]) - bits_of(before[key]) for key in before}
    is_weight = moved.pop(WEIGHT) == off[0]
    return is_weight & (sum(moved.values(), torch.zeros_like(off[1])) == off[1])


def _later(tries: Tries, saved: Sequence[str], name: str, key: str) -> Tensor:
    """Return by how much this rank's shard of a value is off in the checkpoints, fp64."""
    tensor, (_, offset) = tries.values(name)[key], local_box(tries.parameters[name])
    whole = difference(saved, name, key)
    return part_of_box(whole, (offset, tuple(tensor.shape))).to(tensor.device)


def size_of(changes: Values, later: Values, key: str) -> Tensor:
    """Return how far each element is off later in the direction of its change by a flip, over the
    root mean square of the tensors, fp64; NaN where it can't be by that flip.

    Args:
        changes: of values by the flip.
        later: by how much these are off; empty: not known.
        key: of the value that was flipped. What it is off decays in the state, or stays.
    """
    size = torch.zeros_like(changes[key])
    for name, off in later.items():
        size += off * changes[name].sign() / off.square().mean().sqrt().clamp(min=1e-300)
    if later:
        change, off = changes[key], later[key]
        size[(off * change < 0) | (off.abs() > TIMES_CHANGE * change.abs())] = math.nan
    return size


def _flips_at(
    hit: Tensor, size: Tensor, parameter: Tensor, name: str, value: str, bit: int
) -> Iterator[Flip]:
    _, offset = local_box(parameter)
    has_replicas = False
    if is_dtensor(parameter):
        pairs = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        has_replicas = any(size > 1 and placement.is_replicate() for size, placement in pairs)
    for inside in hit.nonzero().tolist():
        index = tuple(i + begin for i, begin in zip(inside, offset, strict=True))
        place = Place(name, value, index, dist.get_rank(), has_replicas)
        yield Flip(place, bit, size=float(size[tuple(inside)]))


def _of_weights(tries: Tries, elements: Sequence[Element]) -> list[Flip]:
    """Return flips of these weights before the forward, the most likely bits of all first."""
    ranked = list[tuple[int, Flip]]()
    for element in elements:
        found = tries.element(element.place)
        bits = likely_bits(tries.total(0.0 if found is None else float(found)), element.distance)
        ranked += [(n, Flip(element.place, bit, is_early=True)) for n, bit in enumerate(bits)]
    return [flip for _, flip in sorted(ranked, key=lambda one: one[0])]


def likely_bits(value: float, distance: float) -> list[int]:
    """Return the bits of a number that change it by about `distance`, the most likely first."""
    before = torch.tensor([value])

    def unlikeliness(bit: int) -> float:
        flip_bits(after := before.clone(), bit)
        change = abs(float(after.double() - before.double()))
        if math.isfinite(change) and math.isfinite(distance) and change > 0:
            return abs(math.log2(change / distance))
        return math.inf if math.isfinite(distance) else -bit

    return sorted(BITS, key=unlikeliness)[:BITS_TRIED]
