"""Writes a ladder as one HTML page, of the parts of a run's report."""

import math
from html import escape
from typing import Any

import numpy as np

from meshwright.commands.ladder.state import LadderState
from meshwright.commands.ladder.text import HEAD, describe, row
from meshwright.metrics.report.document import Chart, Curve, document, draw, table

SAMPLES = 60
"""Points of the law's curve."""


def page(state: LadderState) -> str:
    """Return the page."""
    summary = state.summary()
    title = state.document.file.stem
    law = describe(summary["law"]) if summary["law"] else ""
    body = f"<h1>{escape(title)}</h1><p class='soft'>{escape(summary['metric'])}</p>"
    body += f"<p>{escape(law)}</p>"
    if summary["no_law"]:
        body += f'<p class="warn">no prediction: {escape(summary["no_law"])}</p>'
    body += f'<h2>Loss by compute</h2><div class="charts">{draw(_chart(state, summary))}</div>'
    body += f"<h2>Rungs</h2>{table(HEAD, [*map(row, summary['rungs'])])}"
    return document(title, body)


def _chart(state: LadderState, summary: dict[str, Any]) -> Chart:
    """Return the losses, what was predicted of them, and the law where it has one variable."""
    unit = 10 ** max(int(math.log10(min(rung["flops"] for rung in summary["rungs"]))) - 2, 0)
    rows = [(round(rung["flops"] / unit), rung) for rung in summary["rungs"]]
    losses = [(x, rung["loss"]) for x, rung in rows if rung["loss"] is not None]
    predicted = [(x, rung["predicted"]) for x, rung in rows if rung["predicted"] is not None]
    curves = [
        Curve("loss", losses, has_dots=True),
        Curve("predicted", [(x, one["value"]) for x, one in predicted], has_dots=True),
    ]
    for end in ("low", "high"):
        edge = [(x, one[end]) for x, one in predicted if one[end] is not None]
        curves.append(Curve(end, edge, is_thin=True))
    if state.law is not None and not state.no_law and state.document.terms == ["C"]:
        first, last = rows[0][0], max(x for x, _ in rows)
        places = [round(x) for x in np.geomspace(first, last, SAMPLES)]
        law = [(x, state.law.loss_at(np.log([float(x * unit)]))) for x in places]
        curves.append(Curve("law", law))
    return Chart("Loss", "nats", curves, x_name=f"compute / {unit:.0e} FLOPs")
