"""How fast a device is: by its data sheet, by published runs, or as
`meshwright plan --calibrate` measured it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from meshwright.commands.plan.devices import Device
from meshwright.commands.plan.trace import Collective, Operator, is_in_node, ranks_in_node
from meshwright.system.errors import check, config_error

ATTENTION_IS_CAUSAL = 0.5
"""Kernels of causal attention skip half of the pairs, which FLOPs for MFU count."""


MATMUL, ATTENTION = 0.6, 0.45
"""Parts of the bf16 FLOP/s of the data sheet that matmuls and attention reach in a step."""


LINK, NETWORK = 0.75, 0.75
"""Parts of the bytes/s of links in a node, and of network cards, that NCCL reaches."""


STREAM = 0.8
"""Part of the memory's bytes/s that operators without FLOPs reach."""


FUSED = 0.5
"""See `Assumed.fused`."""


LAUNCH_S, COLLECTIVE_S = 4e-6, 20e-6


ERROR = 0.15
"""Of an estimated step time: the published steps of docs/planning.md are within it."""


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Of files; NaN is neither."""


@dataclass(frozen=True)
class Rates(ABC):
    """Times of operators and collectives."""

    source: str
    peak: dict[str, Positive]
    """FLOP/s by dtype, of which MFU is a part."""
    link: NotNegative
    """Bytes/s to others of the node; if measured, the highest of all sizes."""
    network: NotNegative
    """Bytes/s to other nodes."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Whether FSDP2's collectives run beside computation."""

    @abstractmethod
    def operator_seconds(self, operator: Operator) -> float:
        """Return the time of an operator."""

    @abstractmethod
    def collective_seconds(self, collective: Collective, per_node: int) -> float:
        """Return the time of a collective."""

    def width(self, ranks: range, per_node: int, *, is_message: bool = False) -> float:
        """Return the bytes/s at which a rank of a group sends.

        NCCL's rings leave a node through the network cards of all ranks that the group has there,
        and each rank sends on all rings. A message leaves through the card of its sender.
        """
        if is_in_node(ranks, per_node):
            return self.link
        cards = 1 if is_message else ranks_in_node(ranks, per_node)
        return min(self.link, cards * self.network)

    def width_of(self, collective: Collective, per_node: int) -> float:
        """Return the bytes/s at which a rank sends in a collective."""
        return self.width(collective.ranks, per_node, is_message=collective.kind == "send")


@dataclass(frozen=True)
class Assumed(Rates):
    """A roofline."""

    stream: float
    """Bytes/s of memory."""
    attention: float = 1.0
    """Part of `peak` that attention reaches."""
    fused: float = 1.0
    """Part of its bytes that a pointwise operator of a block moves, once it is compiled with its
    neighbours."""
    launch_s: float = 0.0
    """Least time of one operator."""
    collective_s: float = 0.0
    """Least time of a collective."""

    @property
    def overlaps(self) -> bool:
        """Only GPUs have data sheets here."""
        return True

    def operator_seconds(self, operator: Operator) -> float:
        """Return the larger of the times for its FLOPs and for its bytes."""
        flops, num_bytes = float(operator.flops), float(operator.num_bytes)
        if "attention" in operator.name:
            flops *= ATTENTION_IS_CAUSAL / self.attention
        elif not flops and operator.module.startswith("layers.") and not operator.is_fsdp:
            num_bytes *= self.fused
        rate = self.peak.get(operator.dtype) or next(iter(self.peak.values()))
        return max(flops / rate, num_bytes / self.stream, self.launch_s)

    def collective_seconds(self, collective: Collective, per_node: int) -> float:
        """Return the time of a ring over its slowest link."""
        width = self.width_of(collective, per_node)
        return self.collective_s + (collective.sent_bytes / width if width else 0.0)


def assumed(device: Device, *, is_compiled: bool = True) -> tuple[Assumed, Assumed] | None:
    """Return the rates of a lower bound and of an estimate; None: nothing is published of the
    device.

    The bound has the data sheet's FLOP/s and links, and every operator without FLOPs fused away.
    The estimate takes the parts of them that published runs reach.
    """
    if not device.flops_per_s:
        return None
    dtypes = ("bfloat16", "float32")
    bound = Assumed(
        f"the bound of the data sheet ({device.source})",
        {dtype: device.peak(dtype) for dtype in dtypes},
        device.link_bytes_per_s,
        device.network_bytes_per_s,
        inf,
    )
    estimate = Assumed(
        "estimated by published runs on H100s",
        {dtype: MATMUL * device.peak(dtype) for dtype in dtypes},
        LINK * device.link_bytes_per_s,
        NETWORK * device.network_bytes_per_s,
        STREAM * device.bytes_per_s,
        attention=ATTENTION / MATMUL,
        fused=FUSED if is_compiled else 1.0,
        launch_s=LAUNCH_S,
        collective_s=COLLECTIVE_S,
    )
    return bound, estimate


Point = tuple[NotNegative, NotNegative, Positive]
"""Bytes and FLOPs of an operator, and its seconds."""


Points = Annotated[list[Point], Field(min_length=1)]


Curve = Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]
"""Bytes that a rank sends, and seconds; rising."""


@dataclass(frozen=True)
class Measured(Rates):
    """Times of operators that ran on the device, by kind and size."""

    device: str
    """Its name, as its driver has it."""
    is_gpu: bool
    ranks: Annotated[int, Field(gt=0)]
    """That measured at the same time, on one machine."""
    host_s: NotNegative
    """Time of the host per operator."""
    operators: Annotated[dict[str, Points], Field(min_length=1)]
    """By name and dtype, as "mm bfloat16"."""
    collectives: dict[str, Curve]
    """By kind; empty for one rank."""

    @property
    def overlaps(self) -> bool:
        """On CPUs collectives take the cores that compute."""
        return self.is_gpu

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], float]:
        return {}

    def operator_seconds(self, operator: Operator) -> float:
        """Return the time of measured operators of its kind, the nearest in size counting most.

        Each is scaled to this one's FLOPs, or without FLOPs to its bytes. A GPU's host works ahead
        of it; a CPU is its own host.
        """
        kind = f"{operator.name} {operator.dtype}"
        key = (kind, operator.num_bytes, operator.flops)
        if key not in self._known:
            self._known[key] = between(self._points(operator), operator.num_bytes, operator.flops)
        seconds = self._known[key]
        return max(seconds, self.host_s) if self.is_gpu else seconds + self.host_s

    def _points(self, operator: Operator) -> list[Point]:
        """Points of the operator's kind, otherwise of the kinds most like it."""
        found = self.operators.get(f"{operator.name} {operator.dtype}")
        if found is not None:
            return found
        of_dtype = [kind for kind in self.operators if kind.endswith(f" {operator.dtype}")]
        attention = list[str]()  # with heads of other widths
        if "attention" in operator.name:
            is_backward = "backward" in operator.name
            attention = [
                kind
                for kind in self.operators
                if "attention" in kind and is_backward == ("backward" in kind)
            ]
        alike = [
            [kind for kind in attention if kind in of_dtype],
            [kind for kind in self.operators if kind.startswith(f"{operator.name} ")],
            attention,
            of_dtype,
            list(self.operators),
        ]
        for kinds in alike:
            points = [point for kind in kinds for point in self.operators[kind]]
            points = [point for point in points if bool(point[1]) == bool(operator.flops)]
            if points:
                return points
        return [(1.0, 1.0, 0.0)]

    def collective_seconds(self, collective: Collective, per_node: int) -> float:
        """Return the time of a measured collective of its kind and size; of others an
        all-gather's. Other nodes are not measured."""
        kinds = [collective.kind, "all_gather"]
        curve = next((self.collectives[kind] for kind in kinds if kind in self.collectives), [])
        if not is_in_node(collective.ranks, per_node):
            least, width = curve[0][1] if curve else 0.0, self.width_of(collective, per_node)
            return least + (collective.sent_bytes / width if width else 0.0)
        return along(curve, collective.sent_bytes)


NEAREST = 3
"""Points that count."""


def between(points: Sequence[Point], num_bytes: float, flops: float) -> float:
    """Return the seconds of an operator from the `NEAREST` of `points`, by the logarithms of bytes
    and FLOPs: scaled to its size, their geometric mean weighted by the inverse 4th power of the
    distance (Shepard 1968, doi:10.1145/800186.810616).

    An arithmetic mean would let a distant tiny operator, whose time is all overhead and scaled up a
    thousandfold, outweigh the near ones."""
    near: list[tuple[float, float]] = []  # distance, seconds
    for size, count, seconds in points:
        by_bytes = (num_bytes + 1) / (size + 1)
        by_flops = flops / count if flops and count else by_bytes
        near.append((log(by_bytes) ** 2 + log(by_flops) ** 2, seconds * by_flops))
    near = sorted(near)[:NEAREST]
    weights = [1 / (distance + 1e-4) ** 2 for distance, _ in near]
    found = sum(weight * log(seconds) for weight, (_, seconds) in zip(weights, near, strict=True))
    return exp(found / sum(weights))


def along(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Return a rising curve's value at `x`: level before its first point, straight between points,
    and in proportion to `x` beyond the last. 0 if there is no point."""
    if not curve:
        return 0.0
    if x <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1] * x / curve[-1][0]


def write_rates(rates: Measured, path: Path) -> None:
    """Write the file that `read_rates` reads."""
    path.write_text(json.dumps(asdict(rates)) + "\n")


def read_rates(path: Path, device: Device, world_size: int) -> Measured:
    """Read a file of `--calibrate`, for jobs on such devices.

    Raises:
        ConfigError: if the file cannot be read, or was measured on another kind of device, or, on a
            CPU, with another number of ranks: each has its part of the cores; or if it has no
            collectives, and the job has.
    """
    key, fix = "--rates", "write one with meshwright plan --calibrate FILE"
    try:
        rates = TypeAdapter(Measured).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise config_error(key, str(path), f"no file of rates ({_reason(error)})", fix) from None
    is_alike = rates.is_gpu == device.is_gpu and device.may_be(rates.device)
    check(is_alike, key, str(path), f"was {rates.source}", f"{fix} on a {device.name}")
    check(
        rates.is_gpu or rates.ranks == world_size,
        key,
        str(path),
        f"was measured with {rates.ranks} ranks at once, and the job has {world_size}",
        f"{fix} --world-size {world_size}",
    )
    rule = f"has no times of collectives, and the job has {world_size} ranks"
    has_collectives = "all_gather" in rates.collectives
    check(world_size == 1 or has_collectives, key, str(path), rule, f"{fix} --world-size 2 or more")
    return rates


def _reason(error: OSError | ValidationError) -> str:
    """Return in a line why a file could not be read: of several mistakes the first."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
