"""Curves as inline SVG with labels in HTML, so that text keeps its size on any screen."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

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
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size and size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"


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


class _Axis:
    """From values to places between 0 and 1."""

    def __init__(self, values: Sequence[float], *, starts_at_zero: bool, is_log: bool) -> None:
        low, high = min(values), max(values)
        if starts_at_zero:
            low = min(low, 0.0)
        if low == high:
            low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
        self.is_log = is_log
        if is_log:
            low, high = math.log10(low), math.log10(high)
        margin = (high - low) * 0.05
        self._low = low if starts_at_zero and not is_log else low - margin
        self._high = high + margin

    def place(self, value: float) -> float:
        value = math.log10(value) if self.is_log else value
        return (value - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return ticks(self._low, self._high)
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        many = [10.0**power for power in powers]
        if len(many) >= 2:
            return many[:: math.ceil(len(many) / 5)]
        return [10**exponent for exponent in ticks(self._low, self._high, 3)]


def draw(chart: Chart) -> str:
    """Return a chart as HTML; nothing if it has no points."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return ""
    if chart.is_stacked:
        curves = _stacked(curves)
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    zero = chart.starts_at_zero or chart.is_stacked
    is_log = not zero and min(values) > 0 and max(values) / min(values) > 100
    y = _Axis(values, starts_at_zero=zero, is_log=is_log)
    first, last = min(steps), max(steps)
    span = max(last - first, 1)

    def x(step: float) -> float:
        return (step - first) / span

    inside = [s for s in chart.seams if first <= s <= last]
    marks = "".join(_line("seam", WIDTH * x(s), WIDTH * x(s), 0, HEIGHT) for s in inside)
    inside = [s for s in chart.skipped if first <= s <= last]
    marks += "".join(
        _line("skipped", WIDTH * x(s), WIDTH * x(s), HEIGHT - 18, HEIGHT) for s in inside
    )
    if chart.limit is not None and chart.limit <= max(values):
        at = _y(y, chart.limit)
        marks += _line("limit", 0, WIDTH, at, at)
    grid = "".join(_line("grid", 0, WIDTH, _y(y, t), _y(y, t)) for t in y.ticks())
    drawn = "".join(
        _shape(number, curve, curves[number - 1] if number else None, x, y, chart.is_stacked)
        for number, curve in enumerate(curves)
    )
    y_labels = "".join(
        f'<span style="top:{100 * (1 - y.place(t)):.2f}%">{short(t)}</span>' for t in y.ticks()
    )
    x_ticks = [t for t in ticks(first, last) if t == round(t)] if last > first else [first]
    x_labels = "".join(f'<span style="left:{100 * x(t):.2f}%">{short(t)}</span>' for t in x_ticks)
    legend = ""
    if len(curves) > 1:
        keys = (
            f'<span><i class="c{number}"></i>{escape(curve.name)}</span>'
            for number, curve in enumerate(curves)
        )
        legend = f'<p class="legend">{"".join(keys)}</p>'
    scale = ", logarithmic" if is_log else ""
    data = escape(json.dumps(_for_tooltip(chart, first, last)), quote=True)
    return f"""<figure class="chart" data-chart="{data}">
<figcaption>{escape(chart.title)} <small>{escape(chart.unit)}{scale}</small></figcaption>{legend}
<div class="plot"><div class="y">{y_labels}</div>
<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img"
 aria-label="{escape(chart.title)}, {chart.x_name} {first} to {last}">{grid}{drawn}{marks}</svg>
<div class="cross"></div><div class="tip"></div><div class="x">{x_labels}</div></div>
</figure>"""


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _y(axis: _Axis, value: float) -> float:
    return HEIGHT * (1 - axis.place(value))


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
    below: Curve | None,
    x: Callable[[float], float],
    y: _Axis,
    is_area: bool,
) -> str:
    points = curve.points if is_area else thin(curve.points)
    if is_area and len(points) > MOST_POINTS:  # both edges keep the same steps
        points = points[:: math.ceil(len(points) / MOST_POINTS)]

    def path(points: Points) -> str:
        return " ".join(f"{WIDTH * x(s):.1f},{_y(y, v):.1f}" for s, v in points)

    if is_area:
        floor = dict(below.points) if below else {}
        edge = [(step, floor.get(step, 0.0)) for step, _ in reversed(points)]
        return f'<polygon class="area c{number}" points="{path(points)} {path(edge)}"/>'
    dots = ""
    if curve.has_dots or len(points) == 1:
        # a line of no length with round ends stays a circle however the drawing is stretched
        ends = ((WIDTH * x(s), _y(y, v)) for s, v in points)
        dots = "".join(f'<path class="dot c{number}" d="M{a:.1f},{b:.1f}h0"/>' for a, b in ends)
    return f'<polyline class="curve c{number}" points="{path(points)}"/>{dots}'


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
