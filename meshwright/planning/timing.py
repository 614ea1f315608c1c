"""Step time: a replay of the step in two streams."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planning.analysis import middle
from meshwright.planning.rates import Rates
from meshwright.planning.simulate import Simulation
from meshwright.planning.torch_names import Action
from meshwright.planning.work import Collective, Operator


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
