"""Elements that the drawings of docs/images share: for light and for dark screens."""

from collections.abc import Iterable
from html import escape

STYLE = """<style>
text { fill: #1f2328 } .soft { fill: #59636e } .title { font-weight: bold; font-size: 15px }
.box { fill: #f6f8fa; stroke: #818b98 } .line { fill: none; stroke: #818b98; stroke-width: 1.5 }
.grid { stroke: #8884 } polyline { fill: none } .blue { fill: #0969da } .brown { fill: #bc4c00 }
.number { fill: #fff }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .number { fill: #0d1117 } .soft { fill: #9198a1 }
.box { fill: #151b23; stroke: #656c76 } .blue { fill: #4493f8 }
.brown { fill: #f0883e } } </style>"""


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a drawing of that size."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>"])


def text(x: float, y: float, words: str, kind: str = "", *, centered: bool = False) -> str:
    """Return an element with `words`."""
    anchor = ' text-anchor="middle"' if centered else ""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{anchor}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a frame."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="box"/>'


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through `points` with a head at its end."""
    (x0, y0), (x, y) = points[-2:]
    length = max(abs(x - x0), abs(y - y0))
    a, b = (x - x0) / length, (y - y0) / length  # the line is horizontal or vertical at its end
    head = f"M{x:g},{y:g}l{-7 * a - 4 * b:g},{-7 * b - 4 * a:g}l{8 * b:g},{8 * a:g}z"
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="line" points="{line}"/><path class="soft" d="{head}"/>'
