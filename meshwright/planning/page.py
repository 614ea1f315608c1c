"""A plan as a page: the memory curve over the step, the ledger, and the mesh."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from meshwright.planning.devices import GIB, Device
from meshwright.planning.ledger import PURPOSES
from meshwright.planning.report import RankPlan, to_text
from meshwright.preflight import Plan

COLORS = (
    *("#4e79a7", "#a0cbe8", "#f28e2b", "#59a14f", "#e15759", "#edc948", "#b07aa1", "#bab0ac"),
    "#000000",
)
WIDTH, HEIGHT, MARGIN = 960, 320, 60


def to_html(plan: Plan, ranks: list[RankPlan], device: Device) -> str:
    """Return a page that needs no other file."""
    parts = [_curve(rank, device) for rank in ranks]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>meshwright plan</title>"
        "<style>body{font:14px/1.4 sans-serif;max-width:1040px;margin:2em auto}"
        "pre{background:#f6f6f6;padding:1em;overflow:auto}.cell{display:inline-block;"
        "border:1px solid #888;padding:2px 6px;margin:2px;min-width:4em;text-align:center}</style>"
        f"<h1>{escape(plan.config.model.flavor)} on {escape(device.name)}</h1>"
        f"{_mesh(plan, ranks)}{''.join(parts)}"
        f"<pre>{escape(to_text(plan, ranks, device))}</pre></html>\n"
    )


def _curve(rank: RankPlan, device: Device) -> str:
    """Return the bytes over the step, stacked by purpose."""
    top = max((sum(point.values()) for point in rank.curve), default=1) * 1.05
    step = WIDTH / max(1, len(rank.curve) - 1)
    below = [0.0] * len(rank.curve)
    areas = []
    for purpose, color in zip(PURPOSES, COLORS, strict=True):
        above = [low + point[purpose] for low, point in zip(below, rank.curve, strict=True)]
        line = [(MARGIN + i * step, _y(value, top)) for i, value in enumerate(above)]
        base = [(MARGIN + i * step, _y(value, top)) for i, value in enumerate(below)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*line, *reversed(base)])
        areas.append(
            f'<polygon points="{points}" fill="{color}"><title>{purpose}</title></polygon>'
        )
        below = above
    ticks = "".join(
        f'<text x="4" y="{_y(top * part / 4, top) + 4:.0f}">{top * part / 4 / GIB:.1f}</text>'
        for part in range(5)
    )
    limit = device.memory_gib * GIB
    edge = ""
    if limit < top:
        y = _y(limit, top)
        edge = f'<line x1="{MARGIN}" x2="{MARGIN + WIDTH}" y1="{y}" y2="{y}" stroke="red"/>'
    legend = " ".join(
        f'<span style="color:{color}">&#9632;</span> {purpose}'
        for purpose, color in zip(PURPOSES, COLORS, strict=True)
        if rank.most[purpose]
    )
    return (
        f"<h2>Rank {rank.rank}: {rank.peak.num_bytes / GIB:.2f} GiB of tensors, "
        f"{rank.verdict}</h2><p>GiB over the operators of step 2. {legend}</p>"
        f'<svg viewBox="0 0 {WIDTH + MARGIN + 10} {HEIGHT + 30}" font-size="11">'
        f"{''.join(areas)}{ticks}{edge}</svg>"
    )


def _y(value: float, top: float) -> float:
    return 10 + HEIGHT * (1 - value / top)


def _mesh(plan: Plan, ranks: list[RankPlan]) -> str:
    """Return the axes, outermost first, and the stages with their modules."""
    cells = [
        f"<span class=cell>{axis}<br><b>{size}</b></span>"
        for axis, size in asdict(plan.dims).items()
    ]
    shown = {stage for rank in ranks for stage in rank.stages}
    rows = [
        f"<li>{'<b>' if i in shown else ''}stage {i}{'</b>' if i in shown else ''}: "
        f"{escape(_first_to_last(names))}"
        for i, names in enumerate(plan.stage_modules)
    ]
    stages = f"<ol start=0>{''.join(rows)}</ol>" if len(rows) > 1 else ""
    return f"<p>{''.join(cells)}</p>{stages}"


def _first_to_last(names: list[str]) -> str:
    layers = [name for name in names if name.startswith("layers.")]
    others = [name for name in names if not name.startswith("layers.")]
    span = f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else layers[0]
    return ", ".join([span, *others])
