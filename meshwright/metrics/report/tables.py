"""The tables of a run's page, as HTML."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from meshwright.config.changes import differences, shown
from meshwright.config.job_config import JobConfig
from meshwright.metrics.console import duration
from meshwright.metrics.report.document import table
from meshwright.metrics.report.run import Run
from meshwright.metrics.sinks import validation_loss


def validation_table(run: Run) -> str:
    names = run.names("validation/")
    best, _ = best_validation(run) or (None, None)
    head = ["step", *(name.removeprefix("validation/").replace("_", " ") for name in names)]
    cells = [
        [
            f"{row['step']:,}{' best' if row['step'] == best else ''}",
            *(number(row.get(n)) for n in names),
        ]
        for row in run.records
        if any(name in row for name in names)
    ]
    hidden = f"<p class='note'>The last 20 of {len(cells)}; all are in metrics.jsonl.</p>"
    return table(head, cells[-20:]) + (hidden if len(cells) > 20 else "")


def texts(run: Run) -> str:
    """Return the model's text of the first and of the last validation, as they are."""
    steps = [int(row["step"]) for row in run.texts]
    shown = sorted({steps[0], steps[-1]}) if steps else []
    parts = [
        f"<p>Step {step:,}:</p>"
        + "".join(f"<pre>{escape(row['text'])}</pre>" for row in run.texts if row["step"] == step)
        for step in shown
    ]
    note = "<p class='note'>All are in samples.jsonl.</p>" if len(set(steps)) > 2 else ""
    return f'<div class="card">{"".join(parts)}{note}</div>' if parts else ""


def best_validation(run: Run) -> tuple[int, float] | None:
    """Return the step with the lowest mean of all validation losses, and that mean."""
    losses = [(validation_loss(row), int(row["step"])) for row in run.records]
    known = [(loss, step) for loss, step in losses if loss is not None]
    return min(known)[::-1] if known else None


def starts_table(run: Run) -> str:
    rows = []
    processes = [event for event in run.history if event["event"] in ("start", "end")]
    for index, event in enumerate(processes):
        if event["event"] != "start":
            continue
        after = processes[index + 1] if index + 1 < len(processes) else None
        if after is not None and after["event"] == "end":
            until = f"step {after['step']:,}: {after.get('reason', '')}"
            lasted = duration(after["unix_s"] - event["unix_s"])
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
        f"<p>Changed after step {new['step']:,}:</p><pre>{escape(text)}</pre>"
        for old, new in pairwise(run.starts)
        if (text := _changes(old.get("config", {}), new.get("config", {})))
    )
    head = ("start", "from", "ended", "time", "ranks", "mesh")
    return table(head, rows) + (f'<div class="card">{changes}</div>' if changes else "")


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return "\n".join(f"{d.key}: {shown(d.old)} -> {shown(d.new)}" for d in differences(old, new))


def skipped_table(run: Run) -> str:
    rows = [
        [
            f"{row['step']:,}",
            str(row.get("reason", "")),
            number(row.get("loss")),
            number(row.get("grad_norm")),
            ", ".join(f"{name} {a:,} to {b:,}" for name, (a, b) in row.get("samples", {}).items()),
        ]
        for row in run.skipped
    ]
    return table(("step", "reason", "loss", "gradient norm", "samples"), rows)


def sentry_table(run: Run) -> str:
    """What the sentry found, of which only a sick rank has ended the job."""
    rows = [
        [
            f"{event['step']:,}",
            "sick: the job ended" if event["verdict"] == "sick" else f"note: {event['verdict']}",
            "; ".join(
                f"rank {one['rank']} on {one['host']}"
                + (f", GPU {one['gpu']}" if one["gpu"] else "")
                for one in event["ranks"]
            ),
            event["part"],
        ]
        for event in run.history
        if event["event"] == "sentry"
    ]
    return table(("step", "verdict", "ranks", "first difference"), rows)


def proof_table(run: Run) -> str:
    if run.proof is None:
        return ""
    rows = [
        [
            case["name"],
            case.get("verdict", ""),
            str(case["ranks"]),
            *(number(case.get("errors", {}).get(name)) for name in ("loss", "gradient")),
        ]
        for case in run.proof.get("cases", [])
    ]
    reference = run.proof.get("reference", {}).get("verdict", "")
    kind = "good" if run.proof.get("proved") else "warn"
    verdicts = {one["name"]: one["verdict"] for one in run.proof.get("properties", [])}
    failed = [name for name, verdict in verdicts.items() if verdict == "FAILED"]
    is_wrong = failed or "FAILED" in (reference, *(verdict for _, verdict, *_ in rows))
    kind = "bad" if is_wrong else kind
    text = escape(run.proof.get("summary", ""))
    if reference:
        text += f"; one process against plain PyTorch: {reference}"
    if failed:
        text += f"; FAILED on one process: {escape(', '.join(failed))}"
    # a phone shows the first columns
    cells = table(("case", "verdict", "ranks", "loss error", "gradient error"), rows)
    return f'<p class="{kind}">{text}</p><details><summary>Every case</summary>{cells}</details>'


def environment_table(run: Run) -> str:
    if not run.starts:
        return ""
    last = run.starts[-1]
    facts = [
        ("device", last.get("device")),
        ("ranks", last.get("ranks")),
        ("mesh", last.get("mesh")),
        ("host of the first rank", last.get("host")),
        ("system", last.get("system")),
        *last.get("versions", {}).items(),
        ("parameters", f"{last['parameters']:,}" if "parameters" in last else None),
        ("command", last.get("command")),
    ]
    rows = [[name, str(value)] for name, value in facts if value]
    return table((), rows)


def config_table(run: Run) -> str:
    if not run.config:
        return ""
    defaults = JobConfig().model_dump(mode="json")
    rows = [
        [d.key, shown(d.new), shown(d.old)]
        for d in differences(defaults, run.config)
        if shown(d.new) != shown(d.old) and d.key != "job.config_file" and shown(d.new) != "absent"
    ]
    return (
        table(("key", "value", "default"), rows)
        + '<details class="card"><summary>The whole config (config.toml)</summary>'
        + f"<pre>{escape(run.config_text)}</pre></details>"
    )


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def loads_map(run: Run) -> str:
    """Return the tokens of each expert over the layer's mean, as a map: darker if more."""
    if not run.loads:
        return ""
    layers: Mapping[str, Sequence[int]] = run.loads["layers"]
    cells: dict[int, list[str]] = defaultdict(list)  # by darkness, 0 to 8, each one path
    for y, counts in enumerate(layers.values()):
        mean = sum(counts) / len(counts) or 1.0
        for x, count in enumerate(counts):
            cells[round(4 * min(count / mean, 2))].append(f"M{x} {y}h1v1h-1z")
    paths = "".join(
        f'<path d="{"".join(places)}" fill-opacity="{level / 8}"/>'
        for level, places in sorted(cells.items())
    )
    columns, names = max(map(len, layers.values())), [*layers]
    return (
        f'<div class="card"><svg viewBox="0 0 {columns} {len(layers)}" fill="var(--c0)" '
        f'preserveAspectRatio="none" style="width:100%;height:{len(layers)}rem">{paths}</svg>'
        f'<p class="note">Step {run.loads["step"]:,}. A row for each layer, {escape(names[0])} '
        f"to {escape(names[-1])}, a column for each of {columns} experts. Blank: hardly a token; "
        "darkest: twice the mean or more.</p></div>"
    )
