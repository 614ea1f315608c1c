"""From a simulation to numbers: the peak, its ledger, the curve, traffic and FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from meshwright.commands.plan.devices import CAST, COLLECTIVE_S, FLOAT8, LAUNCH_S, WAIT_S, Rates
from meshwright.commands.plan.ledger import AT_START, HOST, PURPOSES, Record
from meshwright.commands.plan.simulate import Simulation
from meshwright.commands.plan.trace import FORWARD, LOSS, UPDATE, TraceEntry, ranks_in_node
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.train.resolve import ResolvedJob

COMPILED = ("layers.", LOSS)
"""Beginnings of names of modules whose pointwise operators are compiled with their neighbors."""

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


class Memory:
    """The bytes that live on the device after each event of a step.

    Args:
        record: of a step with at least one such event.
    """

    def __init__(self, record: Record) -> None:
        self._items = record.items
        self._events = [e for e in record.events if record.items[e.item].purpose != HOST]
        deltas = np.array([event.delta for event in self._events])
        names = [self._items[event.item].purpose for event in self._events]
        purposes = np.array([PURPOSES.index(name) for name in names])
        rows = [np.cumsum(np.where(purposes == row, deltas, 0)) for row in range(len(PURPOSES))]
        self._by_purpose = np.stack(rows)  # (P, E)
        self._total = np.cumsum(deltas)  # (E,)

    @cached_property
    def peak(self) -> Peak:
        """The first moment with the most bytes."""
        at, by_module = int(self._total.argmax()), Counter[str]()
        for event in self._events[: at + 1]:
            item = self._items[event.item]
            if item.purpose in ("activations", "logits and loss"):
                by_module[one_of_all_layers(item.born.module)] += event.delta
        modules = {name: size for name, size in by_module.most_common() if size}
        operator, place = self._items[self._events[at].item].operator, self._events[at].place
        where = place.module, operator, place.phase, place.microbatch
        return Peak(int(self._total[at]), self._ledger(at), modules, *where)

    def _ledger(self, at: int) -> dict[str, int]:
        return dict(zip(PURPOSES, self._by_purpose[:, at].tolist(), strict=True))

    def most(self) -> dict[str, int]:
        """Return the most bytes of each purpose over the step, which need not be at the peak."""
        return dict(zip(PURPOSES, self._by_purpose.max(axis=1).tolist(), strict=True))

    def curve(self) -> list[dict[str, int]]:
        """Return bytes by purpose over the step: in each of `POINTS` equal parts of its events, the
        moment with the most."""
        count = len(self._total)
        begin = sum(event.place == AT_START for event in self._events) - 1
        width = max(1, (count - 1 - begin) // POINTS)
        starts = range(begin, count - width, width)
        return [self._ledger(i + int(self._total[i : i + width + 1].argmax())) for i in starts]

    def by_place(self) -> dict[str, int]:
        """Return the most bytes at every place.

        Layers have five: the first two, the last two, and those between. So models of other depths
        have the same places, and at each of the four bytes grow by the same for every layer;
        between them they are linear.
        """
        layers = sorted({n for e in self._events if (n := layer_of(e.place.module)) >= 0})
        names = {n: f"{i}" for i, n in enumerate(layers[:2])}
        names |= {n: f"-{i}" for i, n in enumerate(layers[:-3:-1], 1)}
        found: dict[str, int] = {}
        for event, total in zip(self._events, self._total.tolist(), strict=True):
            phase, module, microbatch = event.place
            name = names.get(layer_of(module), "")
            key = f"{phase} {one_of_all_layers(module)} {name} {microbatch}"
            found[key] = max(found.get(key, 0), total)
        return found


@cache  # of the few modules of a model, for every event
def layer_of(module: str) -> int:
    """Return the number of the layer that the module is in, or -1."""
    match = re.match(r"layers\.(\d+)", module)
    return int(match[1]) if match else -1


@cache
def one_of_all_layers(module: str) -> str:
    """Return the module's name without the number of its layer."""
    return re.sub(r"\blayers\.\d+", "layers.*", module) or "(model)"


@dataclass
class Traffic:
    """One rank's messages along one axis by one kind of collective, per step."""

    axis: str
    kind: str
    calls: int
    sent_bytes: float
    is_in_node: bool


def traffic(simulation: Simulation, ranks_per_node: int) -> list[Traffic]:
    """Return the traffic of a step, the largest first."""
    rows: dict[tuple[str, str, bool], Traffic] = {}
    for times, entry in simulation.whole_step():
        if entry.axis:
            axis, kind = entry.axis, entry.name
            near = ranks_in_node(entry.ranks, ranks_per_node) == len(entry.ranks)
            row = rows.setdefault((axis, kind, near), Traffic(axis, kind, 0, 0, near))
            row.calls += times
            row.sent_bytes += round(times * entry.sent_bytes)
    return sorted(rows.values(), key=lambda row: -row.sent_bytes)


def flops(simulation: Simulation) -> dict[str, int]:
    """Return the FLOPs of one rank's step, by phase, attention apart from matrix products."""
    found = Counter[str]()
    for times, entry in simulation.whole_step():
        if entry.flops:
            kind = "attention" if "attention" in entry.name else "matrices"
            found[f"{kind}, {entry.at.phase}"] += times * entry.flops
    return dict(sorted(found.items()))


def entry_seconds(entry: TraceEntry, device: Rates) -> float:
    """Return the time of an operator or a collective.

    An operator takes the larger of the times for its FLOPs and for its bytes; a collective that of
    a ring over its slowest link.
    """
    if entry.axis:
        width = ring_width(entry.ranks, device, is_message=entry.name == "send")
        return COLLECTIVE_S + entry.sent_bytes / width
    if is_wait(entry):
        return COLLECTIVE_S + WAIT_S
    flops, num_bytes, parts = float(entry.flops), float(entry.num_bytes), device.parts
    cast_bytes = 0.0
    if "attention" in entry.name:
        kernel = "flash" if "flex" in entry.name else device.kernel
        reached = parts.attention(kernel, entry.head_width)["backward" in entry.name]
        flops *= entry.pairs * parts.matmul / reached
    elif "grouped" in entry.name:
        flops *= parts.matmul / parts.grouped
    elif entry.is_float8:
        flops *= parts.matmul / (2 * FLOAT8[device.recipe])
        cast_bytes = CAST * entry.read_bytes
    elif not flops and not entry.is_fsdp and entry.at.module.startswith(COMPILED):
        num_bytes *= device.fused
    seconds = max(flops / device.peak(entry.dtype), num_bytes / device.bytes_per_s, LAUNCH_S)
    return seconds + cast_bytes / device.bytes_per_s


def ring_width(ranks: range, device: Rates, *, is_message: bool = False) -> float:
    """Return the bytes/s at which a rank of a group sends.

    NCCL's rings leave a node through the network cards of all ranks that the group has there, and
    each rank sends on all rings. A message leaves through the card of its sender.
    """
    cards = ranks_in_node(ranks, device.per_node)
    if cards == len(ranks):
        return device.link_bytes_per_s
    network = device.network_bytes_per_s * (1 if is_message else cards)
    return min(device.link_bytes_per_s, network)


@dataclass(frozen=True)
class StepTime:
    """Of one rank's step."""

    seconds: float
    exposed_s: float
    """Communication that computation waits for."""
    bubble: float
    """Part of the step in which the rank waits for other stages."""
    waits: int = 0
    """Of the host for the device, to learn how many tokens go to experts of other ranks."""


def step_time(simulation: Simulation, resolved: ResolvedJob, device: Rates) -> StepTime | None:
    """Replay the step's entries in two streams, computation and FSDP2's communication; None:
    nothing is published of the device.

    FSDP2 issues an all-gather ahead, so it starts as soon as the one before it was taken out of its
    buffer; the copy out of the buffer waits for it. A reduce-scatter starts when its gradients are
    there, and the end of backward waits for the last. Every other collective is waited for.
    """
    if not device.flops_per_s:
        return None
    now = comm = compute = copied_out = 0.0
    gathers: list[float] = []  # ends of the gathers under way
    spent = [0.0, 0.0]  # of the microbatch that stands for others: backward, forward
    for entry in simulation.entries:
        before, seconds = now, entry_seconds(entry, device)
        if not entry.axis:
            is_copy_out = entry.is_fsdp and entry.name == "split_with_sizes_copy"
            if is_copy_out and gathers:
                now = max(now, gathers.pop(0))
            now += seconds
            compute += seconds
            if is_copy_out:
                copied_out = now
            if entry.at.phase == UPDATE:
                now = max(now, comm)
        elif entry.is_fsdp and entry.name == "all_gather":
            comm = max(comm, copied_out) + seconds
            gathers.append(comm)
        elif entry.is_fsdp:
            comm = max(comm, now) + seconds
        else:
            now += seconds
        if entry.at.microbatch == simulation.repeated:
            kind = entry.at.phase == FORWARD
            spent[kind] = spent[kind] + now - before
    backward, forward = spent
    each, now = forward + backward, max(now, comm)
    seconds = now + simulation.left_out * each
    part = bubble(resolved, backward / each)
    waits = sum(times for times, entry in simulation.whole_step() if is_wait(entry))
    return StepTime(seconds / (1 - part), seconds - compute * seconds / now, part, waits)


def is_wait(entry: TraceEntry) -> bool:
    """Return whether the host waits for the device."""
    return entry.name == "exchange_counts"


def bubble(resolved: ResolvedJob, backward: float) -> float:
    """Return the part of a step in which a rank of the pipeline waits, with stages of equal time.

    (p - 1) / (v m + p - 1) with v stages per rank and m microbatches: Narayanan et al. 2021,
    arXiv:2104.04473. If backward is split, its second half fills the wait but for the longer one of
    a forward and a half (torch's schedules, replayed). If the last stage can't split its own, the
    others wait for half a backward of each microbatch but one of p, and once more (replayed).

    Args:
        backward: part of a microbatch's time.
    """
    ranks, schedule = resolved.dims.pp, resolved.config.parallelism.pipeline_parallel_schedule
    num_microbatches = resolved.config.num_microbatches
    wait = ranks - 1.0
    if SCHEDULES[schedule].splits_backward:
        wait *= max(1 - backward, backward / 2)
        if ranks > 1 and resolved.model_args.table.uses_copy_again:
            late = 1 + num_microbatches * (ranks - 1) / ranks
            wait = (ranks - 1) * (1 - backward) + backward / 2 * late
    return wait / (len(resolved.pipeline_modules) // ranks * num_microbatches + wait)
