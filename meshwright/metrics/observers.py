"""The seam on which everything optional in a run hangs: the EMA of the weights, the best
checkpoint, sample generations, the report of skipped steps, the profiler and the sinks."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from meshwright.metrics.sinks import Record

Evaluate = Callable[[], dict[str, float]]
"""Evaluates the model with the weights that it has now; returns the metrics by name."""


class Observer:
    """Watches a run and may add to it. No method here does anything: override some.

    Each rank has the same observers and calls them in the same order, so a method may be
    collective. For each step that is trained, the calls are

    1. `after_update`, inside the step, and `after_step`, once the step was handed to the device;
    2. `check`, if the host reads results of the step;
    3. `figures` and `on_report`, if the step is logged, with `on_validation` between the two if
       the model is evaluated;
    4. `wants_save`, and if the step is saved `check` and `state_dict`;
    5. `on_step_end`.

    As a context it is entered before the first step of this process, and left after the last one
    was saved, or with the error that ends the run.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close files; don't raise the error, which is on its way anyway."""

    def after_update(self, skip_update: Tensor) -> None:
        """The weights were updated, unless `skip_update`, () bool on the device. Don't wait for
        the device here."""

    def after_step(self, step: int, samples_read: tuple[int, ...]) -> None:
        """The host has handed `step` to the device, which may still compute it.

        Args:
            samples_read: of each source, by all ranks and since step 1.
        """

    def check(self) -> None:
        """Look at the device's results; raise an error here to end the run before
        anything is logged or saved."""

    def figures(self) -> dict[str, float]:
        """Return metrics for the record of the step, by name."""
        return {}

    def on_validation(
        self, evaluate: Evaluate, is_stopped: Callable[[], bool]
    ) -> Mapping[str, float]:
        """The model was evaluated; return more metrics for the record.

        Args:
            evaluate: evaluates it once more, for an observer that changes the weights meanwhile.
            is_stopped: a collective; return soon once it says that the ranks stop.
        """
        return {}

    def on_report(self, record: Record) -> None:
        """The record of a logged step is complete."""

    def wants_save(self, step: int) -> bool:
        """Return whether to save `step`, whatever the interval: the same on every rank."""
        return False

    def on_trace_request(self) -> None:
        """Somebody has asked for a trace of the next steps, by the file PROFILE."""

    def on_step_end(self) -> None:
        """The work after a step is done; the next one starts."""

    def state_dict(self) -> Any:
        """Return the state that a resume on any mesh needs, as JSON; None: there is none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take over the state that `state_dict` returned, from a checkpoint."""
