"""Compares the metrics that a mesh writes with one process's."""

import math
from collections.abc import Iterator, Mapping, Sequence

from meshwright.metrics.sinks import Record
from meshwright.train.metric_table import METRICS

PER_DEVICE = ("time/wps", "time/tflops", "time/mfu_pct", "time/mfu_causal_pct")
"""Rates of one device; a step takes as long on any mesh here, so all devices have one process's."""

SUMS = (
    "optim/grad_norm/",
    "layer_stats/",
    "qk_clip/",
    "loss/train/",
    "loss/mtp_",
    "experts/entropy",
    "experts/balance_",
    "experts/sequence_",
    "experts/r",
)
"""Beginnings of the names of sums in floating point, whose last bits depend on the mesh."""

ROUNDING = 1e-12
"""Relative error of a few operations in fp64."""


def compare_records(
    wanted: Sequence[Record],
    ranks: Sequence[Sequence[Record]],
    *,
    sums: float,
    later_sums: float,
    own: float,
    slack: Sequence[Mapping[str, float]] = (),
) -> list[str]:
    """Return a line for each metric that differs: where it first does.

    Args:
        wanted: of one process, by step.
        ranks: of every rank.
        sums, later_sums: relative errors up to which `SUMS` are equal at step 1, and later.
        own: the same of metrics of a user's module.
        slack: of these, by step: sizes that `own` is relative to as well, since sums may cancel.
    """
    found = dict[str, str]()
    for rank, records in enumerate(ranks):
        for number, (want, got) in enumerate(zip(wanted, records, strict=True)):
            sizes = slack[number] if slack else {}
            bound = sums if want is wanted[0] else later_sums
            bounds = dict.fromkeys(METRICS, own)
            bounds |= {name: bound for name in want.keys() | got.keys() if name.startswith(SUMS)}
            for name, line in _differences(want, got, len(ranks), bounds, sizes):
                found.setdefault(name, f"{line} at step {want['step']} on rank {rank}")
    return [*found.values()]


def _differences(
    want: Record,
    got: Record,
    num_devices: int,
    bounds: Mapping[str, float],
    sizes: Mapping[str, float],
) -> Iterator[tuple[str, str]]:
    """Yield the names of metrics that differ, and how."""
    for name in sorted(want.keys() | got.keys()):
        wanted, figure = want.get(name, math.nan), got.get(name, math.nan)
        bound = bounds.get(name, 0.0)
        if name.startswith("optim/lr"):
            bound = ROUNDING
        if name in PER_DEVICE:
            wanted, bound = wanted / num_devices, ROUNDING
        # an infinite bound times zero is NaN, within which nothing lies
        size = max(abs(wanted), sizes.get(name, 0.0))
        limit = bound * size if bound < math.inf else math.inf
        is_equal = figure == wanted or abs(figure - wanted) <= limit
        if not is_equal:
            yield name, f"{name}: {figure:.7g} instead of {wanted:.7g}"
