"""A page that needs no other file and no network, and its tables."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import repeat

from meshwright.html.style import CSS, SCRIPT


def document(title: str, body: str) -> str:
    """Return a page.

    Args:
        title: plain text.
        body: HTML.
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · meshwright</title><style>{CSS}</style></head><body><main>
{body}
</main><script>{SCRIPT}</script></body></html>
"""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], classes: Iterable[str] | None = None
) -> str:
    """Return a table in a card; nothing without rows.

    Args:
        classes: "good", "bad" or "" for each row.
    """
    lines = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for kind, row in zip(classes or repeat(""), rows, strict=False)
    )
    if not lines:
        return ""
    top = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>" if head else ""
    return f'<div class="card scroll"><table>{top}{lines}</table></div>'
