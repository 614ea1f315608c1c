"""From a simulation to figures: the peak, its ledger, the curve, traffic and FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.commands.plan.ledger import AT_START, PURPOSES, Record
from meshwright.commands.plan.rates import Rates
from meshwright.commands.plan.simulate import Simulation
from meshwright.commands.plan.torch_names import Action
from meshwright.commands.plan.trace import Collective, Operator, is_in_node

ROUNDING = 512
"""Bytes that the CUDA allocator rounds every tensor up to (c10/cuda/CUDACachingAllocator)."""


POINTS = 400
"""Of the curve."""


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which most bytes live."""

    num_bytes: int
    by_purpose: dict[str, int]
    by_module: dict[str, int]
    """Activations, logits and loss; layers are one module."""
    module: str
    operator: str
    phase: str
    microbatch: int


def find_peak(record: Record) -> Peak:
    """Find the first moment with the most bytes."""
    total = highest = at = 0
    for index, event in enumerate(record.events):
        total += event.delta
        if total > highest:
            highest, at = total, index
    by_purpose, by_module = Counter[str](), Counter[str]()
    for event in record.events[: at + 1]:
        item = record.items[event.item]
        by_purpose[item.purpose] += event.delta
        if item.purpose in ("activations", "logits and loss"):
            by_module[one_of_all_layers(item.born.module)] += event.delta
    item, place = record.items[record.events[at].item], record.events[at].place
    return Peak(
        highest,
        {purpose: by_purpose[purpose] for purpose in PURPOSES},
        {name: size for name, size in by_module.most_common() if size},
        place.module,
        item.operator,
        place.phase,
        place.microbatch,
    )


def peaks_by_place(record: Record) -> dict[str, int]:
    """Return the most bytes at every place.

    A run of neighbouring layers has five: the first two, the last two, and those between. So models
    of other depths have the same places, and at each of the four bytes grow by the same for every
    layer; between them they are linear.
    """
    numbers = sorted({n for e in record.events if (n := _layer(e.place.module)) is not None})
    names: dict[int | None, str] = {None: ""}
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or runs[-1][-1] + 1 != number:
            runs.append([])
        runs[-1].append(number)
    for run, layers in enumerate(runs):
        for index, number in enumerate(layers):
            from_end = index - len(layers)
            names[number] = f"{run}: {from_end if from_end > -3 else index if index < 2 else ''}"
    found: dict[str, int] = {}
    total = 0
    for event in record.events:
        total += event.delta
        phase, module, microbatch = event.place
        key = f"{phase} {one_of_all_layers(module)} {names[_layer(module)]} {microbatch}"
        found[key] = max(found.get(key, 0), total)
    return found


def _layer(module: str) -> int | None:
    match = re.match(r"layers\.(\d+)", module)
    return int(match[1]) if match else None


def rounded_peak(record: Record) -> int:
    """Return the peak with every tensor rounded up as the CUDA allocator does."""
    sizes = [0] * len(record.items)
    total = highest = 0
    for event in record.events:
        before = -(-sizes[event.item] // ROUNDING)
        sizes[event.item] += event.delta
        total += ROUNDING * (-(-sizes[event.item] // ROUNDING) - before)
        highest = max(highest, total)
    return highest


def most_by_purpose(record: Record) -> dict[str, int]:
    """Return the most bytes of each purpose over the step, which need not be at the peak."""
    now, most = Counter[str](), Counter[str]()
    for event in record.events:
        purpose = record.items[event.item].purpose
        now[purpose] += event.delta
        most[purpose] = max(most[purpose], now[purpose])
    return {purpose: most[purpose] for purpose in PURPOSES}


def curve(record: Record) -> list[dict[str, int]]:
    """Return bytes by purpose over the step: in each of `POINTS` equal parts of its events, the
    moment with the most."""
    now, total = Counter[str](), 0
    found: list[dict[str, int]] = []
    events = record.events
    begin = sum(event.place == AT_START for event in events)
    for event in events[:begin]:
        now[record.items[event.item].purpose] += event.delta
        total += event.delta
    width = max(1, (len(events) - begin) // POINTS)
    best, highest = dict(now), total
    for index, event in enumerate(events[begin:], start=1):
        now[record.items[event.item].purpose] += event.delta
        total += event.delta
        if total > highest:
            best, highest = dict(now), total
        if index % width == 0:
            found.append({purpose: best.get(purpose, 0) for purpose in PURPOSES})
            best, highest = dict(now), total
    return found


def one_of_all_layers(module: str) -> str:
    """Return the module's name without the number of its layer."""
    return re.sub(r"\blayers\.\d+", "layers.*", module) or "(model)"


def repeated(simulation: Simulation, num_microbatches: int) -> Iterator[tuple[int, TraceEntry]]:
    """Yield every entry of the step, with how many times the whole step has it."""
    left_out = num_microbatches - simulation.simulated
    repeats = middle(simulation.simulated)
    for entry in simulation.entries:
        yield (1 + left_out if entry.microbatch == repeats else 1), entry


def middle(simulated: int) -> int:
    """Return the microbatch that stands for the ones left out."""
    return max(1, simulated - 1)


TraceEntry = Operator | Collective


@dataclass(frozen=True)
class Traffic:
    """One rank's messages along one axis by one kind of collective, per step."""

    axis: str
    kind: str
    calls: int
    sent_bytes: float
    is_in_node: bool


def traffic(simulation: Simulation, num_microbatches: int, ranks_per_node: int) -> list[Traffic]:
    """Return the traffic of a step, the largest first."""
    calls, sent = Counter[tuple[str, str, bool]](), Counter[tuple[str, str, bool]]()
    for times, entry in repeated(simulation, num_microbatches):
        if isinstance(entry, Collective):
            key = (entry.axis, entry.kind, is_in_node(entry.ranks, ranks_per_node))
            calls[key] += times
            sent[key] += round(times * entry.sent_bytes)
    rows = [
        Traffic(axis, kind, calls[axis, kind, near], size, near)
        for (axis, kind, near), size in sent.items()
    ]
    return sorted(rows, key=lambda row: -row.sent_bytes)


def num_groups(simulation: Simulation) -> int:
    """Return how many process groups of this rank communicate: one for each axis."""
    return len({one.axis for one in simulation.entries if isinstance(one, Collective)})


def flops(simulation: Simulation, num_microbatches: int) -> dict[str, int]:
    """Return the FLOPs of one rank's step, by phase, attention apart from matrix products."""
    found = Counter[str]()
    for times, entry in repeated(simulation, num_microbatches):
        if isinstance(entry, Operator) and entry.flops:
            kind = "attention" if "attention" in entry.name else "matrices"
            found[f"{kind}, {entry.phase}"] += times * entry.flops
    return dict(sorted(found.items()))


def entry_seconds(entry: Operator | Collective, rates: Rates, per_node: int) -> float:
    """Return the time of an operator or a collective."""
    if isinstance(entry, Operator):
        return rates.operator_seconds(entry)
    return rates.collective_seconds(entry, per_node)


@dataclass(frozen=True)
class StepTime:
    """Of one rank's step."""

    seconds: float
    compute_s: float
    exposed_s: float
    """Communication that computation waits for."""
    bubble: float
    """Part of the step in which the rank waits for other stages."""


def step_time(
    simulation: Simulation, num_microbatches: int, rates: Rates, per_node: int
) -> StepTime:
    """Replay the step's entries in two streams, computation and FSDP2's communication.

    FSDP2 issues an all-gather ahead, so it begins as soon as the one before it was taken out of its
    buffer; the copy out of the buffer waits for it. A reduce-scatter begins when its gradients are
    there, and the end of backward waits for the last. Every other collective is waited for; on CPUs
    all are.
    """
    now = comm = compute = copied_out = 0.0
    gathers: list[float] = []  # ends of the gathers under way
    spent: dict[tuple[str, int], float] = {}  # by kind of action and microbatch
    last = simulation.entries[-1]
    for entry in simulation.entries:
        before, seconds = now, entry_seconds(entry, rates, per_node)
        if isinstance(entry, Operator):
            if entry.is_copy_out and gathers:
                now = max(now, gathers.pop(0))
            now += seconds
            compute += seconds
            if entry.is_copy_out:
                copied_out = now
            if entry.phase == "update":
                now = max(now, comm)
        else:
            is_beside = entry.is_fsdp and rates.overlaps
            if is_beside and entry.kind == "all_gather":
                comm = max(comm, copied_out) + seconds
                gathers.append(comm)
            elif is_beside:
                comm = max(comm, now) + seconds
            else:
                now += seconds
        key = ("F" if entry.phase == "forward" else "B", entry.microbatch)
        spent[key] = spent.get(key, 0.0) + now - before
        if entry is last:
            now = max(now, comm)
    left_out = num_microbatches - simulation.simulated
    repeats = middle(simulation.simulated)
    each = spent.get(("F", repeats), 0.0) + spent.get(("B", repeats), 0.0)
    seconds, compute = now + left_out * each, compute * (now + left_out * each) / now
    part = bubble(
        simulation.actions, spent.get(("F", repeats), 1.0), spent.get(("B", repeats), 2.0)
    )
    return StepTime(seconds / (1 - part), compute, seconds - compute, part)


def bubble(actions: dict[int, list[Action]], forward: float, backward: float) -> float:
    """Return the part of a step in which a rank of the pipeline waits, by the schedule's actions.

    Args:
        forward, backward: time of each for one microbatch of one rank; stages are taken for equal.
    """
    if not actions:
        return 0.0
    stages = 1 + max(action.stage for order in actions.values() for action in order)
    per_rank = stages / len(actions)
    cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    ends: dict[Action, float] = {}
    places, clocks = dict.fromkeys(actions, 0), dict.fromkeys(actions, 0.0)
    while any(places[rank] < len(order) for rank, order in actions.items()):
        moved = False
        for rank, order in actions.items():
            while places[rank] < len(order):
                action = order[places[rank]]
                ready = _ready(action, stages, ends)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + cost[action.kind] / per_rank
                ends[action] = clocks[rank]
                places[rank] += 1
                moved = True
        assert moved, "a schedule that waits in a circle"
    whole = max(clocks.values())
    busy = sum(cost[action.kind] / per_rank for action in next(iter(actions.values())))
    return 1 - busy / whole


def _ready(action: Action, stages: int, ends: dict[Action, float]) -> float | None:
    """When the inputs of `action` are there; None: not yet."""
    kind, stage, microbatch = action
    needed: list[tuple[Action, ...]] = []  # one of each tuple
    if kind == "F" and stage > 0:
        needed.append((Action("F", stage - 1, microbatch),))
    if kind in ("B", "I"):
        needed.append((Action("F", stage, microbatch),))
        if stage < stages - 1:
            after = stage + 1
            needed.append((Action("B", after, microbatch), Action("I", after, microbatch)))
    if kind == "W":
        needed.append((Action("I", stage, microbatch),))
    found = [[ends[option] for option in options if option in ends] for options in needed]
    if not all(found):
        return None
    return max((min(times) for times in found), default=0.0)
