"""Steps that were taken again, next to their records, and what rounding explains. Free of torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.metrics.report.run import Row

LEAST_ROUNDING = 1e-7
"""Relative differences below it are taken for rounding: an ulp of float32 is 6e-8 to 1.2e-7."""

TIMES_ROUNDING = 10.0
"""How many times the difference of the twin a metric may differ from the record."""

WITHOUT_TWIN = {"float32": 1e-5, "bfloat16": 5e-2}
"""Relative differences by rounding where nothing measures them, by the type of activations: of 10
times the largest that were measured between meshes."""

HORIZON = 1e-3
"""Relative difference of the twin's loss from which steps are no longer comparable: where rounding
has grown so much, it doubles every few steps."""


def metrics_of(row: Row) -> list[float]:
    """Return the loss, the norm, and the norms of groups of a step."""
    return [
        number(row.get("loss")),
        number(row.get("grad_norm")),
        *map(number, row.get("norms", [])),
    ]


def number(value: float | None) -> float:
    """Return a metric of a record, which has null for what isn't finite."""
    return math.nan if value is None else value


def differences(row: Row, wanted: Row) -> list[float]:
    """Return relative differences of the metrics that both have: the norms may be missing."""
    return list(map(relative, metrics_of(row), metrics_of(wanted)))


def relative(value: float, wanted: float) -> float:
    """Return the relative difference: 0 where neither is finite, infinite where one of them is."""
    if math.isfinite(value) != math.isfinite(wanted):
        return math.inf
    return abs(value - wanted) / max(abs(wanted), 1e-30) if math.isfinite(wanted) else 0.0


@dataclass(frozen=True)
class ComparedStep:
    """A step, next to its record and its twin: the same step with other microbatches."""

    taken: Row
    recorded: Row | None
    """None: the run hasn't logged the step."""
    twin: Row | None = None
    """None: there is none, as the bits are equal, or a step is a single sequence."""

    @property
    def differences(self) -> list[float]:
        """Relative differences from the record: of loss, norm and the recorded groups' norms."""
        return [] if self.recorded is None else differences(self.taken, self.recorded)

    @property
    def is_equal(self) -> bool:
        """Whether every metric of the record is equal to the bit."""
        return not any(self.differences)

    @property
    def rounding(self) -> list[float]:
        """Relative differences of the twin, of the same metrics."""
        return [] if self.twin is None else differences(self.twin, self.taken)


@dataclass(frozen=True)
class ComparedSteps:
    """The steps from a checkpoint on."""

    dtype: str
    """That forward and backward compute in."""
    steps: Sequence[ComparedStep]

    @cached_property
    def beyond_horizon(self) -> ComparedStep | None:
        """The first step up to which rounding by itself has grown too much to compare any."""
        return next((s for s in self.steps if s.rounding and s.rounding[0] > HORIZON), None)

    @cached_property
    def comparable(self) -> Sequence[ComparedStep]:
        """The steps before that one."""
        beyond = self.beyond_horizon
        return self.steps if beyond is None else self.steps[: self.steps.index(beyond)]

    @cached_property
    def bounds(self) -> list[float]:
        """How far each metric may be off by rounding: loss, norm, norms of groups."""
        if rounding := [step.rounding for step in self.comparable if step.rounding]:
            columns = zip(*rounding, strict=True)
            return [TIMES_ROUNDING * max(*column, LEAST_ROUNDING) for column in columns]
        return [WITHOUT_TWIN[self.dtype]] * len(metrics_of(self.steps[0].taken))

    def is_beyond(self, differences: Sequence[float]) -> bool:
        """Return whether one of a step's metrics differs by more than rounding."""
        return any(map(float.__gt__, differences, self.bounds))

    @property
    def not_as_recorded(self) -> ComparedStep | None:
        """The first comparable step that differs from its record by more than rounding."""
        return next((one for one in self.comparable if self.is_beyond(one.differences)), None)

    def first_other(self, steps: Mapping[int, Row], wanted: Mapping[int, Row]) -> int | None:
        """Return the first comparable step that two takes have in different ways, by more than
        rounding."""
        known = (one.taken["step"] for one in self.comparable)
        common = (step for step in known if step in steps and step in wanted)
        apart = ((step, differences(steps[step], wanted[step])) for step in common)
        return next((step for step, of_step in apart if self.is_beyond(of_step)), None)
