"""Tables and sizes for people who read them in a terminal, and for awk."""

from collections.abc import Mapping, Sequence
from typing import Any


def align(rows: Sequence[Sequence[object]]) -> str:
    """One line a row, each column as wide as its widest, all but the first two spaces apart."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    """To three digits: 1.17 GB. Powers of 1000, without a space for awk's sake: 1.17GB."""
    size, units = float(count), iter(("B", "KB", "MB", "GB"))
    for unit in units:
        if size < 999.5:
            return f"{size:.{3}g}{unit}"
        size /= 1000
    return f"{size:,.4g}TB"


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
