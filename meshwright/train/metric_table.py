"""The metrics of the user's module, by name. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def first(sums: Any, options: Any) -> Any:
    return sums[0]


@dataclass(frozen=True)
class Metric:
    """A number of each step, the same on every rank and on any mesh.

    Its functions get the options of [options.NAME], or None.
    """

    measure: Callable[[Any, Any], Any]
    """From this rank's `StepParts` and the options to (K,) summands of fp32 or int64, on the device
    or the host. They are added up over all ranks: int64 exactly."""
    result: Callable[[Any, Any], Any] = first
    """From the sums, (K,) on the device, and the options to the metric, ()."""


OF_RECORDS = (
    *("step", "loss/", "data/", "time/", "memory/", "validation/", "average/", "experts/"),
    *("layer_stats/", "optim/grad_norm", "optim/lr", "optim/skipped_steps"),
    "qk_clip/",
)
"""How the names start that records have for our metrics."""

METRICS: dict[str, Metric] = {}
"""By the name that records have for it, such as "optim/zeros"."""
