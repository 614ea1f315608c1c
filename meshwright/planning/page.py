"""A plan as a page: the memory curve over the step, the ledger, and the mesh."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from meshwright.html.charts import Chart, Curve, draw
from meshwright.html.document import document
from meshwright.planning.devices import GIB, Device
from meshwright.planning.ledger import PURPOSES
from meshwright.planning.report import RankPlan, to_text
from meshwright.preflight import Plan


def to_html(plan: Plan, ranks: list[RankPlan], device: Device) -> str:
    """Return a page that needs no other file."""
    title = f"{plan.config.model.flavor} on {device.name}"
    curves = "".join(_curve(rank, device) for rank in ranks)
    return document(
        title,
        f'<h1>{escape(title)}</h1>{_mesh(plan, ranks)}<h2>Memory</h2><div class="charts">{curves}'
        f'</div><div class="card"><pre>{escape(to_text(plan, ranks, device))}</pre></div>',
    )


def _curve(rank: RankPlan, device: Device) -> str:
    """Return a chart of the bytes over the step, stacked by purpose."""
    curves = [
        Curve(purpose, [(i, point[purpose] / GIB) for i, point in enumerate(rank.curve, 1)])
        for purpose in PURPOSES
    ]
    title = f"Rank {rank.rank}: {rank.peak.num_bytes / GIB:.2f} GiB of tensors, {rank.verdict}"
    unit = "GiB over the operators of step 2"
    return draw(
        Chart(title, unit, curves, is_stacked=True, limit=device.memory_gib, x_name="moment")
    )


def _mesh(plan: Plan, ranks: list[RankPlan]) -> str:
    """Return the axes of the mesh, and the stages with their modules."""
    tiles = [
        f'<div class="tile"><span>{axis}</span><b>{size}</b></div>'
        for axis, size in asdict(plan.dims).items()
    ]
    shown = {stage for rank in ranks for stage in rank.stages}
    rows = [
        f"<li>{'<b>' if i in shown else ''}stage {i}{'</b>' if i in shown else ''}: "
        f"{escape(_first_to_last(names))}</li>"
        for i, names in enumerate(plan.stage_modules)
    ]
    stages = f'<ol start="0">{"".join(rows)}</ol>' if len(rows) > 1 else ""
    return f'<div class="tiles">{"".join(tiles)}</div>{stages}'


def _first_to_last(names: list[str]) -> str:
    layers = [name for name in names if name.startswith("layers.")]
    others = [name for name in names if not name.startswith("layers.")]
    span = f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else layers[0]
    return ", ".join([span, *others])
