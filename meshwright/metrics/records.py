"""The record of a logged step, and the sinks that take it; docs/metrics.md explains each name."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

Record = dict[str, float | int]
"""`step`, and figures in groups: loss/, optim/, validation/, average/, time/, memory/,
data/."""


class Sink(Protocol):
    """Takes one record per logged step."""

    def write(self, record: Record) -> None:
        """`record["step"]` is the step; the rest are its figures."""

    def close(self) -> None:
        """Nothing is written afterwards."""


Texts = Mapping[str, str]
"""Texts that the model wrote, by their prompts, with which they begin."""


@runtime_checkable
class TextSink(Protocol):
    """A sink that takes texts, too."""

    def write_texts(self, step: int, texts: Texts) -> None:
        """Take the texts of a validation, after the record of its step."""


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
