"""Step time: every operator on a roofline, collectives by link, and a replay of two streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from meshwright.planning.analysis import middle
from meshwright.planning.devices import Device
from meshwright.planning.simulate import Simulation
from meshwright.planning.torch_names import Action
from meshwright.planning.work import Collective, Operator

ATTENTION_IS_CAUSAL = 0.5
"""Kernels of causal attention skip half of the pairs, which FLOPs for MFU count."""


@dataclass(frozen=True)
class Rates:
    """How fast a device is."""

    source: str
    matrix: dict[str, list[tuple[float, float]]]
    """By dtype: (FLOPs of one product, FLOP/s), rising; between points it is interpolated."""
    attention: dict[str, float]
    """FLOP/s by dtype of the pairs that are not skipped; backward apart, as "bfloat16 backward"."""
    stream: dict[str, float]
    """Bytes/s by operator; "" for all others."""
    launch_s: float
    """Least time of one operator."""
    link: float
    """Bytes/s to others of the node."""
    network: float
    collective_s: float
    """Least time of a collective."""


def assumed(device: Device) -> tuple[Rates, Rates] | None:
    """Return the rates of a bound and of a poor case; None: nothing is published of the device.

    The bound is the data sheet's FLOP/s and links, with everything else fused away. The poor case
    has 35 % of the FLOP/s, half of the bandwidths, 10 microseconds per operator, and fuses nothing:
    below the 38 to 43 % MFU that Grattafiori et al. 2024 (arXiv:2407.21783, table 4) give for steps
    of a model of 405B on H100s.
    """
    if not device.flops_per_s:
        return None

    def rates(flops: float, width: float, stream: float, launch_s: float, name: str) -> Rates:
        peak = device.flops_per_s * flops
        fp32 = peak / 16  # without TF32
        return Rates(
            name,
            {"bfloat16": [(1.0, peak)], "float32": [(1.0, fp32)]},
            {"bfloat16": peak, "float32": fp32},
            {"": stream},
            launch_s,
            device.link_bytes_per_s * width,
            device.network_bytes_per_s * width,
            5 * launch_s,
        )

    best = rates(1.0, 1.0, inf, 0.0, f"the bound of the data sheet ({device.source})")
    poor = "35 % of its FLOP/s, half of its bandwidths, nothing fused"
    return best, rates(0.35, 0.5, 0.5 * device.bytes_per_s, 10e-6, poor)


def operator_seconds(operator: Operator, rates: Rates) -> float:
    """Return the larger of the times for its FLOPs and for its bytes."""
    compute = 0.0
    if operator.flops and "attention" in operator.name:
        key = operator.dtype + " backward" * ("backward" in operator.name)
        rate = rates.attention.get(key) or rates.attention.get(operator.dtype, 0.0)
        compute = ATTENTION_IS_CAUSAL * operator.flops / rate if rate else 0.0
    elif operator.flops:
        curve = rates.matrix.get(operator.dtype) or next(iter(rates.matrix.values()))
        compute = operator.flops / interpolate(curve, operator.flops)
    width = rates.stream.get(operator.name, rates.stream[""])
    memory = 0.0 if operator.flops and len(rates.stream) > 1 else operator.num_bytes / width
    return max(compute, memory, rates.launch_s)


def interpolate(curve: Sequence[Sequence[float]], x: float) -> float:
    """Return the curve's value at `x`, straight between its points and level beyond them."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1]


def collective_seconds(collective: Collective, rates: Rates, per_node: int) -> float:
    """Return the time of a ring over its slowest link."""
    width = rates.link if collective.span < per_node else rates.network
    return rates.collective_s + (collective.sent_bytes / width if width else 0.0)


def entry_seconds(entry: Operator | Collective, rates: Rates, per_node: int) -> float:
    """Return the time of an operator or a collective."""
    if isinstance(entry, Operator):
        return operator_seconds(entry, rates)
    return collective_seconds(entry, rates, per_node)


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
    there, and the end of backward waits for the last. Every other collective is waited for.
    """
    now = comm = compute = copied_out = 0.0
    gathers: list[float] = []  # when those that are under way end
    marks: dict[int, float] = {}  # when each microbatch begins
    spent: dict[tuple[str, int], float] = {}  # by kind of action and microbatch
    last = simulation.entries[-1]
    for entry in simulation.entries:
        marks.setdefault(entry.microbatch, now)
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
            if entry.is_fsdp and entry.kind == "all_gather":
                comm = max(comm, copied_out) + seconds
                gathers.append(comm)
            elif entry.is_fsdp:
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
