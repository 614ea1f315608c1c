"""The figures of a logged step, by name; docs/metrics.md has their meanings."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

Record = dict[str, float | int]
"""`step`, and figures in groups: loss/, optim/, validation/, time/, memory/, data/."""


class Sink(Protocol):
    """Takes one record per logged step."""

    def write(self, record: Record) -> None:
        """`record["step"]` is the step; the rest are its figures."""

    def close(self) -> None:
        """Nothing is written afterwards."""


def validation_loss(figures: Mapping[str, Any]) -> float | None:
    """Return the mean loss of all validation sets; None if there is none, or one is not finite."""
    losses = [
        value
        for name, value in figures.items()
        if name.startswith("validation/") and name.endswith("/loss")
    ]
    if not losses or not all(value is not None and math.isfinite(value) for value in losses):
        return None
    return float(sum(losses) / len(losses))
