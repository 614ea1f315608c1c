"""The frame of an HTML page that needs no other file: style, script, tables."""

from collections.abc import Sequence
from html import escape

CSS = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #fff; --ink: #1d2330; --soft: #667085;
  --line: #e4e7ec; --warn: #b54708; --bad: #c01048; --good: #067647;
  --c0: #2563eb; --c1: #d97706; --c2: #0d9488; --c3: #9333ea; --c4: #94a3b8; --c5: #be123c;
  --c6: #65a30d; --c7: #0891b2; --c8: #713f12 }
@media (prefers-color-scheme: dark) { :root { --paper: #12151c; --card: #1a1f29; --ink: #e6e9ef;
  --soft: #98a2b3; --line: #2c3442; --warn: #fdb022; --bad: #fd6f8e; --good: #47cd89;
  --c0: #6ea0ff; --c1: #f5b14c; --c2: #3fc6b6; --c3: #c08bff; --c4: #7b8798; --c5: #ff7d97;
  --c6: #a3d65c; --c7: #22d3ee; --c8: #ca9a5b } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1.5rem; margin: 0 0 .6rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem;
  margin: 2.2rem 0 .7rem } p { margin: .3rem 0 } small, .note, .soft { color: var(--soft) }
.note { font-size: .85rem } a { color: var(--c0) }
.pill { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; font-size: .85rem;
  border: 1px solid currentColor } .good { color: var(--good) } .warn { color: var(--warn) }
.bad { color: var(--bad) }
.tiles { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(8.2rem, 1fr));
  margin-top: 1rem }
.tile, .chart, .card { background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; padding: .7rem .9rem; margin: 0; min-width: 0 }
.tile b { display: block; font-size: 1.2rem; white-space: nowrap;
  font-variant-numeric: tabular-nums }
.tile span { color: var(--soft); font-size: .82rem } .tile small { font-size: .8rem }
.charts { display: grid; gap: .9rem; grid-template-columns: repeat(2, minmax(0, 1fr)) }
.charts > :only-child { grid-column: 1 / -1 } .charts + .card, .card + .card { margin-top: .9rem }
@media (max-width: 46rem) { .charts { grid-template-columns: minmax(0, 1fr) }
  main { padding: 1rem .7rem 3rem } .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)) } }
figcaption { font-weight: 600 } figcaption small { font-weight: 400; margin-left: .3rem }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .82rem;
  color: var(--soft) } .legend i { display: inline-block; width: .7rem; height: .7rem;
  border-radius: .15rem; margin-right: .35rem; background: var(--c) }
.plot { position: relative; height: 13.5rem; margin: .6rem .6rem 1.6rem 3.3rem;
  touch-action: pan-y } .plot svg { display: block; width: 100%; height: 100%;
  overflow: visible } .y span, .x span { position: absolute; color: var(--soft);
  font-size: .75rem; font-variant-numeric: tabular-nums; white-space: nowrap }
.y span { right: calc(100% + .5rem); transform: translateY(-50%) }
.x span { top: calc(100% + .3rem); transform: translateX(-50%) }
.grid { stroke: var(--line) } .curve { fill: none; stroke: var(--c); stroke-width: 1.8;
  stroke-linejoin: round } .dot { stroke: var(--c); stroke-width: 7; stroke-linecap: round }
.area { fill: var(--c); stroke: var(--card); stroke-width: 1 }
.seam { stroke: var(--soft); stroke-dasharray: 4 4 } .skipped, .limit { stroke: var(--bad);
  stroke-width: 2 } svg * { vector-effect: non-scaling-stroke }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) }
.c4 { --c: var(--c4) } .c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }
.c8 { --c: var(--c8) }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft);
  display: none; pointer-events: none }
.tip { position: absolute; top: .2rem; display: none; pointer-events: none; z-index: 1;
  background: var(--ink); color: var(--paper); border-radius: .4rem; padding: .25rem .55rem;
  font-size: .8rem; white-space: pre; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } .scroll pre { white-space: pre }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums } th, td { text-align: left; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top } th { color: var(--soft);
  font-weight: 500; white-space: nowrap } tr:last-child td { border-bottom: 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0;
  font: .82rem/1.5 ui-monospace, Menlo, Consolas, monospace } summary { cursor: pointer }
@media print { .chart, .card, .tile { break-inside: avoid } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll(".chart")) {
  const { x, first, last, names, rows } = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".plot"), tip = figure.querySelector(".tip");
  const cross = figure.querySelector(".cross");
  const hide = () => { tip.style.display = cross.style.display = "none"; };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = first + (event.clientX - box.left) / box.width * (last - first);
    let low = 0, high = rows.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (rows[mid][0] < at) low = mid; else high = mid;
    }
    const row = Math.abs(rows[low][0] - at) < Math.abs(rows[high][0] - at) ? rows[low] : rows[high];
    const left = last > first ? (row[0] - first) / (last - first) * 100 : 0;
    const lines = names.map((name, i) => row[i + 1] === null ? null
      : (names.length > 1 ? name + " " : "") + row[i + 1]).filter((line) => line !== null);
    tip.textContent = [x + " " + row[0], ...lines].join("\\n");
    tip.style.display = cross.style.display = "block";
    cross.style.left = left + "%";
    tip.style.left = left < 50 ? `calc(${left}% + .5rem)` : "auto";
    tip.style.right = left < 50 ? "auto" : `calc(${100 - left}% + .5rem)`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}
"""


def document(title: str, body: str) -> str:
    """Return a page with a plain title and a body of HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · meshwright</title><style>{CSS}</style></head><body><main>
{body}
</main><script>{SCRIPT}</script></body></html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a card; nothing without rows."""
    if not rows:
        return ""
    lines = [f"<th>{'</th><th>'.join(map(escape, head))}</th>"] if head else []
    lines += [f"<td>{'</td><td>'.join(map(escape, row))}</td>" for row in rows]
    return f'<div class="card scroll"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'
