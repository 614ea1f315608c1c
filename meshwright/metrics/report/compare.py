"""Writes several runs as one HTML page: curves on one axis, configs, losses on equal batches."""

import os
from collections.abc import Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from meshwright.config.changes import Difference, differences, effect_of, shown
from meshwright.config.section import OnResume
from meshwright.metrics.report.charts import Chart, Curve, draw
from meshwright.metrics.report.document import document, table
from meshwright.metrics.report.page import FIGURES, body, made, validation_losses
from meshwright.metrics.report.run import TOKENS, Run
from meshwright.metrics.report.tables import best_validation, number

DECISIVE = (
    *("training.global_batch_size", "training.datasets"),
    *("checkpoint.initial_load_", "experimental.custom_import"),
)
"""Keys of weights and batches, in addition to the keys whose `OnResume` says so."""

Named = Sequence[tuple[str, Run]]


def comparison(runs: Sequence[Run]) -> str:
    """Return the page of two or more runs; the first is the reference."""
    named = list(zip(_names(runs), runs, strict=True))
    sections = {
        "": _summary(named),
        "Curves": _charts(named),
        "Loss on equal batches": _pairs(named),
        "Configs": _configs(named),
    }
    title = " and ".join(_names(runs)) if len(runs) == 2 else f"{len(runs)} runs"
    return document(title, f"<h1>{escape(title)}</h1>{body(sections)}{made(runs)}")


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the ends of the folders, as short as they can be and still differ."""
    paths = [run.folder.resolve().parts for run in runs]
    lengths = range(1, max(map(len, paths)))
    length = next((n for n in lengths if len({p[-n:] for p in paths}) == len(set(paths))), 1)
    return [os.path.join(*path[-length:]) for path in paths]


def _summary(named: Named) -> str:
    rows = []
    for name, run in named:
        best = best_validation(run)
        speeds, memory = run.values("time/wps"), run.values("memory/peak_gib")
        rows.append(
            [
                name,
                f"{run.last('step') or 0:,}",
                number(run.last("loss/train")),
                f"{best[1]:.4f} at step {best[0]:,}" if best else "-",
                f"{median(speeds):,.0f}" if speeds else "-",
                number(max(memory, default=None)),
                str(run.starts[-1].get("mesh", "-")) if run.starts else "-",
            ]
        )
    head = ("run", "step", "loss", "best validation", "tokens/s per device", "GiB", "mesh")
    return table(head, rows)


def _charts(named: Named) -> str:
    """Charts over steps; over tokens, if a step of one run has more of them than another's."""
    sizes = {t / row["step"] for _, run in named for row in run.records if (t := row.get(TOKENS))}
    x = TOKENS if len(sizes) > 1 else "step"
    losses = dict.fromkeys(name for _, run in named for name in validation_losses(run))
    figures: list[tuple[str, str, str, dict[str, Any]]] = [
        ("Training loss", "nats per token", "loss/train", {}),
        *((name.removesuffix("/loss"), "nats per token", name, {}) for name in losses),
        *FIGURES,
    ]
    drawn = ""
    for title, unit, figure, options in figures:
        curves = [
            Curve(name, run.series(figure, x), has_dots=figure in losses) for name, run in named
        ]
        x_name = x.removeprefix("data/")
        drawn += draw(Chart(title.capitalize(), unit, curves, x_name=x_name, **options))
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _pairs(named: Named) -> str:
    """The loss of each run minus the first's, where both began alike and saw the same batches."""
    (reference, base), *others = named
    losses = dict(base.series("loss/train"))
    curves, rows, notes = [Curve(reference, [])], [], ""
    for name, run in others:
        apart = [d.key for d in differences(base.config, run.config) if _is_decisive(d)]
        points = [(s, v - losses[s]) for s, v in run.series("loss/train") if s in losses]
        if apart or not points:
            why = ", ".join(f"another {key}" for key in apart) or "no step is in both logs"
            notes += f'<p class="note">{escape(name)} is not compared: {escape(why)}.</p>'
            continue
        curves.append(Curve(name, points))
        far, at = max((abs(value), step) for step, value in points)
        end = points[-max(len(points) // 4, 1) :]
        first = f"{points[0][1]:+.2g} at step {points[0][0]:,}"
        last = f"{fmean(value for _, value in end):+.4g} from step {end[0][0]:,}"
        rows.append([name, f"{len(points):,}", first, f"{far:.2g} at step {at:,}", last])
    steps = sorted({step for curve in curves for step, _ in curve.points})
    curves[0] = Curve(reference, [(step, 0.0) for step in steps])  # the first color is its own
    drawn = draw(Chart(f"Loss minus the loss of {reference}", "nats per token", curves))
    head = ("run", "steps in both", "first", "largest", "mean of the last quarter")
    return (f'<div class="charts">{drawn}</div>' if drawn else "") + table(head, rows) + notes


def _is_decisive(difference: Difference) -> bool:
    """Whether two runs that differ so have other weights at the start, or other batches."""
    effect = effect_of(difference.key)
    return effect in (OnResume.MODEL, OnResume.DATA) or difference.key.startswith(DECISIVE)


def _configs(named: Named) -> str:
    """A row for each key whose values are not all equal."""
    (_, base), *others = named
    values: dict[str, list[str]] = {}
    for column, (_, run) in enumerate(others, 1):
        for key, old, new in differences(base.config, run.config):
            values.setdefault(key, [shown(old)] * len(named))[column] = shown(new)
    rows = [[key, *row] for key, row in values.items() if key != "job.config_file"]
    return table(("key", *(name for name, _ in named)), rows) or "<p>They are equal.</p>"
