"""Writes an experiment as one HTML page, of the parts of a run's report."""

from collections.abc import Iterator
from html import escape
from statistics import fmean
from typing import Any

from meshwright.commands.experiment.results import Key
from meshwright.commands.experiment.state import HEAD, State, cells
from meshwright.config.changes import shown
from meshwright.metrics.report.document import WIDTH, Chart, Curve, document, draw, short, table

KINDS = {"better": "good", "worse": "bad", "diverged": "bad", "open": "warn"}
"""Classes of verdicts, which give them colors; the others have none."""

SEEDS = '<p class="note">Gray: the differences of single seeds.</p>'

MOST_CHARTS = 24
"""Arms whose differences are drawn: a chart takes up to 20 kB."""


def page(state: State) -> str:
    """Return the page."""
    summary = state.summary()
    title = state.document.file.stem
    base, metric = summary["base"], summary["metric"]
    facts = [f"{summary['finished']} runs of {summary['steps']:,} steps", metric]
    if base["mean"] is not None:
        facts.append(f"base {base['mean']:.4f}")
    if base["spread"] is not None:
        facts.append(f"spread over {base['seeds']} seeds {base['spread']:.2g}")
    arms = summary["arms"]
    drawn = "".join(map(draw, _charts(state, arms)))
    body = f"<h1>{escape(title)}</h1><p class='soft'>{escape(' · '.join(facts))}</p>"
    body += f"<h2>Differences from the base</h2>{_strips(arms, summary['margin'])}"
    body += f"<h2>Arms</h2>{_table(arms)}"
    body += f'<h2>Differences by step</h2><div class="charts">{drawn}</div>{SEEDS}' if drawn else ""
    return document(title, body)


def _table(arms: list[dict[str, Any]]) -> str:
    rows = [
        [
            *cells(arm),
            "" if arm["on"] == "base" else arm["on"],
            ", ".join(f"{key} = {shown(value)}" for key, value in arm["keys"].items()),
        ]
        for arm in arms
    ]
    return table((*HEAD, "on", "keys"), rows)


def _strips(arms: list[dict[str, Any]], margin: float) -> str:
    """Return a line for each arm: its interval, its mean, and the margin as a band."""
    ends = [
        abs(arm[key]) for arm in arms for key in ("low", "high", "mean") if arm[key] is not None
    ]
    reach = 1.1 * max([*ends, 2 * margin, 1e-9])

    def x(value: float) -> float:
        return WIDTH * (0.5 + 0.5 * max(-1.0, min(value / reach, 1.0)))

    band = f'<rect x="{x(-margin):.1f}" width="{x(margin) - x(-margin):.1f}" height="20"/>'
    band = f'<g fill="var(--line)">{band}</g>'
    zero = f'<line class="seam" x1="{x(0)}" x2="{x(0)}" y1="0" y2="20"/>'
    rows = ""
    for arm in arms:
        kind = KINDS.get(arm["verdict"], "soft")
        line = ""
        if arm["mean"] is not None:
            low, high = (
                edge if arm[key] is None else arm[key]
                for key, edge in (("low", -reach), ("high", reach))
            )
            line = f'<path d="M{x(low):.1f},10H{x(high):.1f}" stroke-width="2"/>'
            line += f'<path d="M{x(arm["mean"]):.1f},10h0" stroke-width="8"/>'
        rows += (
            f'<p>{escape(arm["arm"])} <small class="{kind}">{escape(arm["verdict"])}</small></p>'
            f'<svg viewBox="0 0 {WIDTH:g} 20" preserveAspectRatio="none" class="{kind}" '
            f'stroke="currentColor" stroke-linecap="round" style="width:100%;height:1.2rem" '
            f'role="img" aria-label="{escape(arm["arm"])}: {escape(arm["verdict"])}">'
            f'<g stroke="none">{band}</g>{zero}{line}</svg>'
        )
    note = (
        f"From -{short(reach)} to {short(reach)}; left is better. Gray: the margin of {margin:g}."
    )
    return f'<div class="card">{rows}<p class="note">{note}</p></div>'


def _charts(state: State, arms: list[dict[str, Any]]) -> Iterator[Chart]:
    """Yield the differences of each arm by step: of each seed, and their mean."""
    for arm in arms[:MOST_CHARTS]:
        seeds = []
        for seed in state.seeds:
            own, other = (state.results.get(Key(name, seed)) for name in (arm["arm"], arm["on"]))
            if own is not None and other is not None and own.curve:
                before = dict(other.curve)
                seeds.append({step: v - before[step] for step, v in own.curve if step in before})
        steps = sorted(set[int]().union(*seeds))
        complete = [step for step in steps if all(step in seed for seed in seeds)]
        mean = [(step, fmean(seed[step] for seed in seeds)) for step in complete]
        thin = [Curve(f"seed {n}", [*seed.items()], is_thin=True) for n, seed in enumerate(seeds)]
        title = f"{arm['arm']} minus {arm['on']}"
        yield Chart(title, state.experiment.metric, [Curve("mean", mean, has_dots=True), *thin])
