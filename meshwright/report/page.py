"""A run as one HTML file that needs no other, and no network."""

import time
import tomllib
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

from meshwright.config.changes import differences, shown
from meshwright.config.job_config import JobConfig
from meshwright.metrics.record import validation_loss
from meshwright.report.charts import Chart, Curve, draw, short
from meshwright.report.run import Run
from meshwright.report.style import CSS, SCRIPT

PARTS = {  # of a step
    "time/forward_backward_s": "forward + backward",
    "time/data_s": "waiting for data",
    "time/communication_s": "all-reduce",
    "time/optimizer_s": "optimizer",
}


def page(run: Run) -> str:
    """Return the report of a run."""
    title = run.folder.resolve().name
    config = _config(run)
    description = config.get("job", {}).get("description", "")
    sections = (
        ("", _charts(run)),
        ("Time", _time_table(run)),
        ("Validation", _validation_table(run)),
        ("Starts and resumes", _starts_table(run)),
        ("Skipped steps", _skipped_table(run)),
        ("Proof", _proof(run)),
        ("Environment", _environment(run)),
        ("Config", _config_section(run, config)),
    )
    body = "".join(
        (f"<h2>{heading}</h2>" if heading else "") + content
        for heading, content in sections
        if content
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · meshwright</title><style>{CSS}</style></head><body><main>
<h1>{escape(title)}</h1><p>{_state(run, config)} <span class="soft">{escape(description)}</span></p>
{_tiles(run, config)}{body}
<p class="note">Made by meshwright report from {escape(str(run.folder))},
{time.strftime("%Y-%m-%d %H:%M")}.</p>
</main><script>{SCRIPT}</script></body></html>
"""


def _config(run: Run) -> dict[str, Any]:
    try:
        return tomllib.loads(run.config_text)
    except tomllib.TOMLDecodeError:
        return {}


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
    tiles: list[tuple[str, str, str]] = []

    def add(name: str, value: str, detail: str = "") -> None:
        tiles.append((name, value, detail))

    steps = config.get("training", {}).get("steps", "?")
    add("step", f"{run.last('step') or 0:,}", f"of {steps:,}" if isinstance(steps, int) else "")
    tokens = run.last("data/tokens")
    if tokens is not None:
        add("tokens", short(tokens), f"{tokens:,}")
    if run.last("loss/train") is not None:
        add("training loss", f"{run.last('loss/train'):.4f}", "nats per token")
    best = _best_validation(run)
    if best is not None:
        add("best validation loss", f"{best[1]:.4f}", f"at step {best[0]:,}")
    speeds = [value for _, value in run.series("time/wps")]
    if speeds:
        add("tokens per second", f"{median(speeds):,.0f}", "per device, median")
    shares = [value for _, value in run.series("time/mfu_pct")]
    if shares:
        flops = [value for _, value in run.series("time/tflops")]
        detail = f"{median(flops):.4g} TFLOP/s per device" if flops else "median"
        add("MFU", f"{median(shares):.1f}%", detail)
    memory = [value for _, value in run.series("memory/peak_gib")]
    if memory:
        add("peak memory", f"{max(memory):.2f} GiB", "first rank")
    seconds = sum(_totals(run).values())
    if seconds:
        resumes = len(run.resumed_steps)
        add(
            "training time",
            _duration(seconds),
            f"resumed {resumes} times" if resumes > 1 else "resumed once" * resumes,
        )
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
        for name in run.names("validation/")
        if name.endswith("/loss")
    ]
    parts = [Curve(label, run.series(name)) for name, label in PARTS.items()]
    parts = [part for part in parts if part.points]
    parts.append(Curve("other", _rest(run)))
    groups = [
        Curve(name.removeprefix("optim/grad_norm/"), run.series(name))
        for name in run.names("optim/grad_norm/")
    ]
    bits = [
        Curve(name.removesuffix("/bits_per_byte"), run.series(name), has_dots=True)
        for name in run.names("validation/")
        if name.endswith("/bits_per_byte")
    ]
    charts: tuple[tuple[str, str, list[Curve], dict[str, bool]], ...] = (
        ("Loss", "nats per token", losses, {}),
        ("Gradient norm", "before clipping", [Curve("norm", run.series("optim/grad_norm"))], {}),
        (
            "Throughput",
            "tokens per second and device",
            [Curve("wps", run.series("time/wps"))],
            {"starts_at_zero": True},
        ),
        ("Time of a step", "seconds", parts, {"is_stacked": True}),
        ("Learning rate", "", [Curve("lr", run.series("optim/lr"))], {"starts_at_zero": True}),
        (
            "Peak memory",
            "GiB, first rank",
            [Curve("memory", run.series("memory/peak_gib"))],
            {"starts_at_zero": True},
        ),
        ("Validation", "bits per byte", bits, {}),
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
    legend = []
    if seams:
        legend.append("dashed lines: resumes")
    if skipped:
        legend.append("red marks: skipped steps")
    note = f'<p class="note">{"; ".join(legend).capitalize()}.</p>' if legend else ""
    return f'<h2>Curves</h2><div class="charts">{drawn}</div>{note}'


def _rest(run: Run) -> list[tuple[int, float]]:
    """Seconds of a step in none of its parts."""
    return [
        (int(row["step"]), max(row["time/step_s"] - sum(row.get(part, 0.0) for part in PARTS), 0.0))
        for row in run.records
        if "time/step_s" in row
    ]


def _totals(run: Run) -> dict[str, float]:
    """Return the seconds of all logged steps by kind of work."""
    totals = dict.fromkeys([*PARTS.values(), "other in steps", "validation", "checkpoints"], 0.0)
    before = 0
    for row in run.records:
        step = int(row["step"])
        before = max([before, *(seam for seam in run.resumed_steps if seam < step)])
        count, before = step - before, step
        for name, label in PARTS.items():
            totals[label] += row.get(name, 0.0) * count
        inside = sum(row.get(name, 0.0) for name in PARTS)
        totals["other in steps"] += max(row.get("time/step_s", 0.0) - inside, 0.0) * count
        totals["validation"] += row.get("time/validation_s", 0.0)
        totals["checkpoints"] += row.get("time/checkpoint_s", 0.0)
    return totals


def _time_table(run: Run) -> str:
    totals = _totals(run)
    whole = sum(totals.values())
    if not whole:
        return ""
    bar = "".join(
        f'<i class="c{number}" style="flex:{seconds:.3f}"></i>'
        for number, seconds in enumerate(totals.values())
        if seconds
    )
    rows = [
        (
            f'<i class="c{number}"></i>{escape(name)}',
            _duration(seconds),
            f"{100 * seconds / whole:.1f}%",
        )
        for number, (name, seconds) in enumerate(totals.items())
        if seconds
    ]
    cells = "".join(
        f'<tr><td class="legend">{name}</td><td>{seconds}</td><td>{share}</td></tr>'
        for name, seconds, share in rows
    )
    return (
        f'<div class="card"><div class="bar">{bar}</div><div class="scroll"><table>{cells}</table>'
        "</div><p class='note'>On the first rank, summed over logged steps: starts and the last "
        "save are not in it. Collectives inside forward and backward count there.</p></div>"
    )


def _validation_table(run: Run) -> str:
    names = run.names("validation/")
    rows = [row for row in run.records if any(name in row for name in names)]
    best = _best_validation(run)
    head = ["step", *(name.removeprefix("validation/").replace("_", " ") for name in names)]
    cells = []
    for row in rows:
        mark = " best" if best is not None and row["step"] == best[0] else ""
        values = [_number(row.get(name)) for name in names]
        cells.append([f"{row['step']:,}{mark}", *values])
    if len(cells) > 20:
        hidden = f"<p class='note'>The last 20 of {len(cells)}; all are in metrics.jsonl.</p>"
        return _table(head, cells[-20:]) + hidden
    return _table(head, cells)


def _best_validation(run: Run) -> tuple[int, float] | None:
    """The step with the lowest mean of all validation losses, and that mean."""
    if run.best is not None:
        return int(run.best["step"]), float(run.best["validation_loss"])
    losses = [(validation_loss(row), int(row["step"])) for row in run.records]
    known = [(loss, step) for loss, step in losses if loss is not None]
    return min(known)[::-1] if known else None


def _starts_table(run: Run) -> str:
    rows = []
    for index, event in enumerate(run.history):
        if event["event"] != "start":
            continue
        after = run.history[index + 1] if index + 1 < len(run.history) else None
        if after is not None and after["event"] == "end":
            until = f"step {after['step']:,}: {after.get('reason', '')}"
            lasted = _duration(after["unix_s"] - event["unix_s"])
        else:
            until, lasted = "without a word" if after else "still running, or killed", ""
        rows.append(
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_s"])),
                f"after step {event['step']:,}" if event["step"] else "from the start",
                until,
                lasted,
                f"{event.get('ranks', '?')} on {event.get('host', '?')}",
                event.get("mesh", ""),
            ]
        )
    changes = "".join(
        f"<p>Changed at the resume after step {new['step']:,}:</p><pre>{escape(text)}</pre>"
        for old, new in pairwise(run.starts)
        if (text := _changes(old.get("config", {}), new.get("config", {})))
    )
    head = ("start", "from", "ended", "time", "ranks", "mesh")
    return _table(head, rows) + (f'<div class="card">{changes}</div>' if changes else "")


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return "\n".join(f"{d.key}: {shown(d.old)} -> {shown(d.new)}" for d in differences(old, new))


def _skipped_table(run: Run) -> str:
    rows = [
        [
            f"{row['step']:,}",
            str(row.get("reason", "")),
            _number(row.get("loss")),
            _number(row.get("grad_norm")),
            ", ".join(f"{name} {a:,} to {b:,}" for name, (a, b) in row.get("samples", {}).items()),
        ]
        for row in run.skipped
    ]
    return _table(("step", "reason", "loss", "gradient norm", "samples"), rows)


def _proof(run: Run) -> str:
    if run.proof is None:
        return ""
    cases = run.proof.get("cases", [])
    failed = [case for case in cases if case.get("failures")]
    kind = "good" if run.proof.get("proved") else "bad"
    text = f"{len(cases) - len(failed)} of {len(cases)} meshes train the same model as one process"
    rows = [
        [case["name"], str(case["ranks"]), _number(case.get("loss_error")),
         _number(case.get("gradient_error")), "FAILED" if case.get("failures") else "equal"]
        for case in cases
    ]  # fmt: skip
    table = _table(("case", "ranks", "loss error", "gradient error", "verdict"), rows)
    return f'<p class="{kind}">{text}</p><details><summary>Every case</summary>{table}</details>'


def _environment(run: Run) -> str:
    if not run.starts:
        return ""
    last = run.starts[-1]
    facts = [
        ("device", last.get("device")),
        ("ranks", last.get("ranks")),
        ("mesh", last.get("mesh")),
        ("host of the first rank", last.get("host")),
        ("system", last.get("system")),
        *((f"{name}", version) for name, version in last.get("versions", {}).items()),
        ("parameters", f"{last['parameters']:,}" if "parameters" in last else None),
        ("command", last.get("command")),
    ]
    rows = [[name, str(value)] for name, value in facts if value]
    return _table((), rows)


def _config_section(run: Run, config: dict[str, Any]) -> str:
    if not config:
        return ""
    defaults = JobConfig().model_dump(mode="json")
    rows = [
        [d.key, shown(d.new), shown(d.old)]
        for d in differences(defaults, config)
        if shown(d.new) != shown(d.old) and d.key != "job.config_file" and shown(d.new) != "absent"
    ]
    return (
        _table(("key", "value", "default"), rows)
        + '<details class="card"><summary>The whole config (config.toml)</summary>'
        + f"<pre>{escape(run.config_text)}</pre></details>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in a card; nothing without rows."""
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    if not lines:
        return ""
    top = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>" if head else ""
    return f'<div class="card scroll"><table>{top}{lines}</table></div>'


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"
