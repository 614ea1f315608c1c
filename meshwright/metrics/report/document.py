"""Parts of an HTML page that needs no other file: style, script, tables, curves as inline SVG."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "page.js"))


def document(title: str, body: str) -> str:
    """Return a page with a plain title and a body of HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · meshwright</title><style>
{STYLE.read_text("utf-8")}</style></head><body><main>
{body}
</main><script>
{SCRIPT.read_text("utf-8")}</script></body></html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a card; nothing without rows."""
    if not rows:
        return ""
    lines = [f"<th>{'</th><th>'.join(map(escape, head))}</th>"] if head else []
    lines += [f"<td>{'</td><td>'.join(map(escape, row))}</td>" for row in rows]
    return f'<div class="card scroll"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


WIDTH, HEIGHT = 1000.0, 300.0
"""Of a drawing, in units that stretch to the screen's."""

MOST_POINTS = 800
"""Points of a curve that are drawn; of more, each stretch's lowest and highest."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Points
    has_dots: bool = False
    is_thin: bool = False
    """Gray and thin, and not in the legend."""


@dataclass(frozen=True)
class Chart:
    """Curves over steps, or whatever `x_name` is, on one axis."""

    title: str
    unit: str
    curves: Sequence[Curve]
    seams: Sequence[int] = ()
    """Steps after which another process resumed."""
    skipped: Sequence[int] = ()
    """Steps that were left out."""
    is_stacked: bool = False
    """Areas on top of each other; all curves have the same steps."""
    starts_at_zero: bool = False
    limit: float | None = None
    """A line across, if a value reaches it."""
    x_name: str = "step"


def short(value: float) -> str:
    """Return a number as a person would write it."""
    size = abs(value)
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4):
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.2g}" if 0 < size < 1e-3 else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Points) -> Points:
    """Return at most `MOST_POINTS` points with the same outline."""
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(len(points) / (MOST_POINTS // 2))
    kept = []
    for start in range(0, len(points), width):
        part = points[start : start + width]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _scale(
    values: Sequence[float], *, from_zero: bool, is_log: bool
) -> tuple[Callable[[float], float], list[float]]:
    """Return the place of a value above the lower edge, 0 to 1, and the values to label."""
    change = math.log10 if is_log else float
    low, high = change(min(values)), change(max(values))
    if from_zero:
        low = min(low, 0.0)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    margin = (high - low) * 0.05
    low, high = low - margin * (not from_zero), high + margin
    labels = ticks(low, high)
    if is_log:
        powers = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
        labels = powers[:: math.ceil(len(powers) / 5)]
    return lambda value: (change(value) - low) / (high - low), labels


def draw(chart: Chart) -> str:
    """Return a chart as HTML; nothing if it has no points."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return ""
    if chart.is_stacked:
        curves = _stacked(curves)
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    from_zero = chart.starts_at_zero or chart.is_stacked
    is_log = not from_zero and min(values) > 0 and max(values) / min(values) > 100
    place, labels = _scale(values, from_zero=from_zero, is_log=is_log)
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        return WIDTH * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return HEIGHT * (1 - place(value))

    drawn = "".join(_line("grid", 0, WIDTH, y(t), y(t)) for t in labels)
    shapes = [_shape(n, curve, x, y, chart.is_stacked) for n, curve in enumerate(curves)]
    if chart.is_stacked:  # each covers the lower part of the next
        shapes.reverse()
    drawn += "".join(shapes)
    for kind, marked, top in (("seam", chart.seams, 0.0), ("skipped", chart.skipped, HEIGHT - 18)):
        inside = (x(step) for step in marked if first <= step <= last)
        drawn += "".join(_line(kind, at, at, top, HEIGHT) for at in inside)
    if chart.limit is not None and chart.limit <= max(values):
        drawn += _line("limit", 0, WIDTH, y(chart.limit), y(chart.limit))
    y_labels = "".join(
        f'<span style="top:{100 * (1 - place(t)):.2f}%">{short(t)}</span>' for t in labels
    )
    x_ticks = [t for t in ticks(first, last) if t == round(t)] if last > first else [first]
    x_labels = "".join(
        f'<span style="left:{100 * x(t) / WIDTH:.2f}%">{short(t)}</span>' for t in x_ticks
    )
    names = "".join(
        f'<span><i class="c{number}"></i>{escape(curve.name)}</span>'
        for number, curve in enumerate(curves)
        if not curve.is_thin
    )
    legend = f'<p class="legend">{names}</p>' if len(curves) > 1 else ""
    scale = ", logarithmic" if is_log else ""
    data = escape(json.dumps(_for_tooltip(chart, first, last)), quote=True)
    return f"""<figure class="chart" data-chart="{data}">
<figcaption>{escape(chart.title)} <small>{escape(chart.unit)}{scale}</small></figcaption>{legend}
<div class="plot"><div class="y">{y_labels}</div>
<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img"
 aria-label="{escape(chart.title)}, {chart.x_name} {first} to {last}">{drawn}</svg>
<div class="cross"></div><div class="tip"></div><div class="x">{x_labels}</div></div>
</figure>"""


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _stacked(curves: Sequence[Curve]) -> list[Curve]:
    """Return each curve on top of those before it."""
    below: dict[int, float] = {}
    stacked = []
    for curve in curves:
        for step, value in curve.points:
            below[step] = below.get(step, 0.0) + value
        stacked.append(Curve(curve.name, [(step, below[step]) for step, _ in curve.points]))
    return stacked


def _shape(
    number: int,
    curve: Curve,
    x: Callable[[float], float],
    y: Callable[[float], float],
    is_area: bool,
) -> str:
    points = [(x(step), y(value)) for step, value in thin(curve.points)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    if is_area:
        ground = " ".join(
            f"{x(step):.1f},{y(0):.1f}" for step, _ in (curve.points[-1], curve.points[0])
        )
        return f'<polygon class="area c{number}" points="{path} {ground}"/>'
    dots = ""
    if curve.has_dots or len(points) == 1:
        # a line of no length with round ends stays a circle however the drawing is stretched
        dots = "".join(f'<path class="dot c{number}" d="M{a:.1f},{b:.1f}h0"/>' for a, b in points)
    color = "thin" if curve.is_thin else f"c{number}"
    return f'<polyline class="curve {color}" points="{path}"/>{dots}'


def _for_tooltip(chart: Chart, first: int, last: int) -> dict[str, object]:
    """Values that the pointer reads: all of few, and every n-th of many."""
    rows: dict[int, list[float | None]] = {}
    for number, curve in enumerate(chart.curves):
        stride = math.ceil(len(curve.points) / MOST_POINTS)
        for step, value in curve.points[:: max(stride, 1)]:
            rows.setdefault(step, [None] * len(chart.curves))[number] = float(f"{value:.5g}")
    return {
        "x": chart.x_name,
        "first": first,
        "last": last,
        "names": [curve.name for curve in chart.curves],
        "rows": [[step, *row] for step, row in sorted(rows.items())],
    }
