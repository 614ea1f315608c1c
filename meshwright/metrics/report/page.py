"""Writes a run as one HTML page: curves, tables, text; or several runs, side by side."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from statistics import fmean, median

from meshwright.config.changes import differences, shown
from meshwright.metrics.console import duration
from meshwright.metrics.report.document import Chart, Curve, document, draw, short, table
from meshwright.metrics.report.run import TOKENS, Row, Run
from meshwright.metrics.report.tables import (
    best_validation,
    config_table,
    environment_table,
    loads_map,
    number,
    proof_table,
    sentry_table,
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
    "time/layer_stats_s": "statistics of layers",
    "time/qk_clip_s": "QK-clip",
}

FIGURES = (
    ("Gradient norm", "before clipping", "optim/grad_norm", False),
    ("Throughput", "tokens per second and device", "time/wps", True),
    ("Learning rate", "", "optim/lr", True),
    ("Peak memory", "GiB, first rank", "memory/peak_gib", True),
)
"""Charts of one metric: title, unit, name, and whether they start at zero."""

BY_GROUP = (
    ("Gradient norm by group", "before clipping", "optim/grad_norm/"),
    ("RMS of activations", "of one sequence", "layer_stats/activation_rms/"),
    ("Largest attention logit", "of one sequence", "layer_stats/max_attention_logit/"),
    ("RMS of gradients", "before clipping", "layer_stats/gradient_rms/"),
    ("Update over weight", "RMS over RMS", "layer_stats/update_over_weight/"),
)
"""Charts of a metric of each layer: title, unit, and the beginning of the names."""

CURVES_PER_CHART = 6


def page(run: Run) -> str:
    title = run.folder.resolve().name
    description = run.config.get("job", {}).get("description", "")
    sections = {
        "": _tiles(run),
        "Curves": _charts(run),
        "Expert load": loads_map(run),
        "Time": _time_table(run),
        "Validation": validation_table(run),
        "Texts": texts(run),
        "Starts and resumes": starts_table(run),
        "Skipped steps": skipped_table(run),
        "Sentry": sentry_table(run),
        "Proof": proof_table(run),
        "Environment": environment_table(run),
        "Config": config_table(run),
    }
    head = f"""<h1>{escape(title)}</h1>
<p>{_state(run)} <span class="soft">{escape(description)}</span></p>"""
    return document(title, f"{head}{_body(sections)}{_made([run])}")


def _body(sections: Mapping[str, str]) -> str:
    """Return the sections that have content, by heading; "" is no heading."""
    return "".join(
        (f"<h2>{heading}</h2>" if heading else "") + content
        for heading, content in sections.items()
        if content
    )


def _made(runs: Sequence[Run]) -> str:
    """Return the last line of a page."""
    folders = escape(", ".join(str(run.folder) for run in runs))
    when = time.strftime("%Y-%m-%d %H:%M")
    return f'<p class="note">Made by meshwright report from {folders}, {when}.</p>'


def _validation_losses(run: Run) -> list[str]:
    return [name for name in run.names("validation/") if name.endswith("/loss")]


def _state(run: Run) -> str:
    """Return whether the run is at its end, as a pill."""
    step = run.last("step") or 0
    if run.history and run.history[-1]["event"] == "end":
        reason = str(run.history[-1].get("reason", ""))
        kind = "good" if reason.startswith("finished") else "warn"
        return f'<span class="pill {kind}">{escape(reason)}</span>'
    steps = run.config.get("training", {}).get("steps")
    if step == steps:
        return '<span class="pill good">finished</span>'
    return '<span class="pill warn">running, or ended without a word</span>'


def _tiles(run: Run) -> str:
    steps = run.config.get("training", {}).get("steps")
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
        if causal := run.values("time/mfu_causal_pct"):
            detail += f"; {median(causal):.1f}% with half of attention's pairs"
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
        for name in _validation_losses(run)
    ]
    parts = [Curve(label, run.series(name)) for name, label in PARTS.items()]
    parts = [part for part in parts if part.points]
    rest = [(row["step"], _other(row)) for row in run.records if "time/step_s" in row]
    parts.append(Curve("other", rest))
    seams, skipped = run.resumed_steps, [int(row["step"]) for row in run.skipped]
    chart = partial(Chart, seams=seams, skipped=skipped)
    charts = [chart("Loss", "nats per token", losses)]
    charts.append(chart("Training loss by source", "nats per token", _curves(run, "loss/train/")))
    charts += [
        chart(title, unit, [Curve(name, run.series(name))], starts_at_zero=from_zero)
        for title, unit, name, from_zero in FIGURES
    ]
    charts.append(chart("Time of a step", "seconds", parts, is_stacked=True))
    for title, unit, prefix in BY_GROUP:
        curves = _curves(run, prefix)
        charts += [
            chart(title, unit, curves[first : first + CURVES_PER_CHART])
            for first in range(0, len(curves), CURVES_PER_CHART)
        ]
    drawn = "".join(map(draw, charts))
    note = ""
    if seams or skipped:
        note = '<p class="note">Dashed lines: resumes and new stages; red marks: skipped steps.</p>'
    return f'<div class="charts">{drawn}</div>{note}' if drawn else ""


def _curves(run: Run, prefix: str) -> list[Curve]:
    """Return a curve for each metric whose name starts with `prefix`, named by the rest."""
    return [Curve(name.removeprefix(prefix), run.series(name)) for name in run.names(prefix)]


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


DECISIVE = (
    "model.args",
    "model.bos_token",
    "model.chat_template_path",
    "model.eos_token",
    "model.flavor",
    "model.name",
    "model.tokenizer_path",
    "training.dataset",
    "training.global_batch_size",
    "training.max_documents",
    "training.mix_file",
    "training.packing",
    "training.seed",
    "training.seq_len",
    "training.shuffle_window",
    "training.stream_shards",
    "training.validation_fraction",
    "checkpoint.initial_load_",
    "experimental.custom_import",
)
"""Beginnings of the keys of initial weights and batches."""

Named = Sequence[tuple[str, Run]]


def comparison(runs: Sequence[Run]) -> str:
    """Return the page of two or more runs; the first is the reference."""
    named = list(zip(_names(runs), runs, strict=True))
    sections = {
        "": _summary(named),
        "Curves": _charts_of_all(named),
        "Loss on equal batches": _pairs(named),
        "Configs": _configs(named),
    }
    title = " and ".join(_names(runs)) if len(runs) == 2 else f"{len(runs)} runs"
    return document(title, f"<h1>{escape(title)}</h1>{_body(sections)}{_made(runs)}")


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


def _charts_of_all(named: Named) -> str:
    """Charts over steps; over tokens, if a step of one run has more of them than another's."""
    sizes = {t / row["step"] for _, run in named for row in run.records if (t := row.get(TOKENS))}
    x = TOKENS if len(sizes) > 1 else "step"
    losses = dict.fromkeys(name for _, run in named for name in _validation_losses(run))
    figures = [
        ("Training loss", "nats per token", "loss/train", False),
        *((name.removesuffix("/loss"), "nats per token", name, False) for name in losses),
        *FIGURES,
    ]
    x_name, drawn = x.removeprefix("data/"), ""
    for title, unit, figure, from_zero in figures:
        curves = [Curve(name, run.series(figure, x), figure in losses) for name, run in named]
        chart = Chart(title.capitalize(), unit, curves, x_name=x_name, starts_at_zero=from_zero)
        drawn += draw(chart)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _pairs(named: Named) -> str:
    """The loss of each run minus the first's, where both started alike and saw the same batches."""
    (reference, base), *others = named
    losses = dict(base.series("loss/train"))
    curves, rows, notes = [Curve(reference, [])], [], ""
    for name, run in others:
        apart = [d.key for d in differences(base.config, run.config)]
        apart = [key for key in apart if key.startswith(DECISIVE)]
        points = [(s, v - losses[s]) for s, v in run.series("loss/train") if s in losses]
        if apart or not points:
            why = ", ".join(f"a different {key}" for key in apart) or "no step is in both logs"
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


def _configs(named: Named) -> str:
    """A row for each key whose values aren't all equal."""
    (_, base), *others = named
    values: dict[str, list[str]] = {}
    for column, (_, run) in enumerate(others, 1):
        for key, old, new in differences(base.config, run.config):
            values.setdefault(key, [shown(old)] * len(named))[column] = shown(new)
    rows = [[key, *row] for key, row in values.items() if key != "job.config_file"]
    return table(("key", *(name for name, _ in named)), rows) or "<p>They are equal.</p>"
