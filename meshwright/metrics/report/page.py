"""Writes a run as one HTML page: curves, tables, texts."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

from meshwright.metrics.console import duration
from meshwright.metrics.report.charts import Chart, Curve, draw, short
from meshwright.metrics.report.document import document, table
from meshwright.metrics.report.run import TOKENS, Row, Run
from meshwright.metrics.report.tables import (
    best_validation,
    config_table,
    environment_table,
    loads_map,
    proof_table,
    skipped_table,
    starts_table,
    texts,
    validation_table,
)

PARTS = {  # of a step
    "time/forward_backward_s": "forward + backward",
    "time/data_s": "waiting for data",
    "time/communication_s": "all-reduce",
    "time/optimizer_s": "optimizer",
}


FROM_ZERO = {"starts_at_zero": True}
FIGURES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Gradient norm", "before clipping", "optim/grad_norm", {}),
    ("Throughput", "tokens per second and device", "time/wps", FROM_ZERO),
    ("Learning rate", "", "optim/lr", FROM_ZERO),
    ("Peak memory", "GiB, first rank", "memory/peak_gib", FROM_ZERO),
)
"""Charts of one metric: title, unit, name, options."""


def page(run: Run) -> str:
    """Return the report of a run."""
    title = run.folder.resolve().name
    config = run.config
    description = config.get("job", {}).get("description", "")
    sections = {
        "": _tiles(run, config),
        "Curves": _charts(run),
        "Loads of experts": loads_map(run),
        "Time": _time_table(run),
        "Validation": validation_table(run),
        "Texts": texts(run),
        "Starts and resumes": starts_table(run),
        "Skipped steps": skipped_table(run),
        "Proof": proof_table(run),
        "Environment": environment_table(run),
        "Config": config_table(run, config),
    }
    head = f"""<h1>{escape(title)}</h1>
<p>{_state(run, config)} <span class="soft">{escape(description)}</span></p>"""
    return document(title, f"{head}{body(sections)}{made([run])}")


def body(sections: Mapping[str, str]) -> str:
    """Return the sections that have content, by heading; "" is no heading."""
    return "".join(
        (f"<h2>{heading}</h2>" if heading else "") + content
        for heading, content in sections.items()
        if content
    )


def made(runs: Sequence[Run]) -> str:
    """Return the last line of a page."""
    folders = escape(", ".join(str(run.folder) for run in runs))
    when = time.strftime("%Y-%m-%d %H:%M")
    return f'<p class="note">Made by meshwright report from {folders}, {when}.</p>'


def validation_losses(run: Run) -> list[str]:
    """Return the names of the losses of validations."""
    return [name for name in run.names("validation/") if name.endswith("/loss")]


def _state(run: Run, config: dict[str, Any]) -> str:
    """Return whether the run is at its end, as a pill."""
    step = run.last("step") or 0
    if run.history and run.history[-1]["event"] == "end":
        reason = str(run.history[-1].get("reason", ""))
        kind = "good" if reason == "finished" else "warn"
        return f'<span class="pill {kind}">{escape(reason)}</span>'
    steps = config.get("training", {}).get("steps")
    if step == steps:
        return '<span class="pill good">finished</span>'
    return '<span class="pill warn">running, or ended without a word</span>'


def _tiles(run: Run, config: dict[str, Any]) -> str:
    steps = config.get("training", {}).get("steps")
    of_steps = f"of {steps:,}" if isinstance(steps, int) else ""
    tiles = [("step", f"{run.last('step') or 0:,}", of_steps)]
    if (tokens := run.last(TOKENS)) is not None:
        tiles.append(("tokens", short(tokens), f"{tokens:,}"))
    if (loss := run.last("loss/train")) is not None:
        tiles.append(("training loss", f"{loss:.4f}", "nats per token"))
    if (best := best_validation(run)) is not None:
        tiles.append(("best validation loss", f"{best[1]:.4f}", f"at step {best[0]:,}"))
    if speeds := run.values("time/wps"):
        tiles.append(("tokens per second", f"{median(speeds):,.0f}", "per device, median"))
    if shares := run.values("time/mfu_pct"):
        detail = f"{median(run.values('time/tflops')):.4g} TFLOP/s per device"
        tiles.append(("MFU", f"{median(shares):.1f}%", detail))
    if memory := run.values("memory/peak_gib"):
        tiles.append(("peak memory", f"{max(memory):.2f} GiB", "first rank"))
    if seconds := sum(_totals(run).values()):
        resumes = sum(not start.get("is_new_stage") for start in run.starts[1:])
        detail = f"resumed {resumes}x" if resumes else ""
        tiles.append(("training time", duration(seconds), detail))
    cells = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(detail)}</small></div>"
        for name, value, detail in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _charts(run: Run) -> str:
    losses = [Curve("training", run.series("loss/train"))]
    losses += [
        Curve(name.removesuffix("/loss"), run.series(name), has_dots=True)
        for name in validation_losses(run)
    ]
    parts = [Curve(label, run.series(name)) for name, label in PARTS.items()]
    parts = [part for part in parts if part.points]
    rest = [(row["step"], _other(row)) for row in run.records if "time/step_s" in row]
    parts.append(Curve("other", rest))
    groups = [
        Curve(name.removeprefix("optim/grad_norm/"), run.series(name))
        for name in run.names("optim/grad_norm/")
    ]
    charts: tuple[tuple[str, str, list[Curve], dict[str, Any]], ...] = (
        ("Loss", "nats per token", losses, {}),
        *((title, unit, [Curve(name, run.series(name))], o) for title, unit, name, o in FIGURES),
        ("Time of a step", "seconds", parts, {"is_stacked": True}),
        *(
            ("Gradient norm by group", "before clipping", groups[first : first + 6], {})
            for first in range(0, len(groups), 6)
        ),
    )
    seams = run.resumed_steps
    skipped = [int(row["step"]) for row in run.skipped]
    drawn = "".join(
        draw(Chart(title, unit, curves, seams, skipped, **options))
        for title, unit, curves, options in charts
    )
    note = '<p class="note">Dashed lines: resumes and new stages; red marks: skipped steps.</p>'
    note *= bool(seams or skipped)
    return f'<div class="charts">{drawn}</div>{note}' if drawn else ""


def _other(row: Row) -> float:
    """Return the seconds of a step in none of its parts."""
    return max(row.get("time/step_s", 0.0) - sum(row.get(part, 0.0) for part in PARTS), 0.0)


def _totals(run: Run) -> dict[str, float]:
    """Return the seconds of all logged steps by kind of work."""
    totals = dict.fromkeys([*PARTS.values(), "other in steps", "validation", "checkpoints"], 0.0)
    begins = {0, *run.resumed_steps, *(row["step"] for row in run.records)}
    before = {end: begin for begin, end in pairwise(sorted(begins))}
    for row in run.records:
        count = row["step"] - before[row["step"]]
        for name, label in PARTS.items():
            totals[label] += row.get(name, 0.0) * count
        totals["other in steps"] += _other(row) * count
        totals["validation"] += row.get("time/validation_s", 0.0)
        totals["checkpoints"] += row.get("time/checkpoint_s", 0.0)
    return totals


def _time_table(run: Run) -> str:
    totals = _totals(run)
    whole = sum(totals.values())
    if not whole:
        return ""
    rows = [
        [name, duration(seconds), f"{100 * seconds / whole:.1f}%"]
        for name, seconds in totals.items()
        if seconds
    ]
    note = "On the first rank, summed over logged steps: starts and the last save are not in it."
    return table((), rows) + f'<p class="note">{note}</p>'
