"""The figures of a logged step, by name; docs/metrics.md says what each means."""

from typing import Protocol

Record = dict[str, float | int]
"""`step`, and figures in groups: loss/, optim/, validation/, time/, memory/, data/."""


class Sink(Protocol):
    """Takes one record per logged step."""

    def write(self, record: Record) -> None:
        """`record["step"]` is the step; the rest are its figures."""

    def close(self) -> None:
        """Nothing is written afterwards."""
