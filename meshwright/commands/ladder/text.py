"""A ladder in words: its law, and a row for each rung."""

from typing import Any

from meshwright.metrics.report.document import short

HEAD = ("width", "parameters", "tokens", "FLOPs", "min", "loss", "predicted", "95 %")


def describe(law: dict[str, Any]) -> str:
    """Return a law in two lines: its form, and its parameters."""
    pairs = zip(law["variables"], ("alpha", "beta"), "AB", strict=False)
    terms = "".join(f" + {factor} / {name}^{power}" for name, power, factor in pairs)
    parts = [
        f"{name} = {law[name]['value']:.3f} ({bounds(law[name], 3)})"
        for name in ("E", "alpha", "beta")
        if name in law
    ]
    return f"L = E{terms}, with errors of {law['error']:.2%}\n{', '.join(parts)}"


def bounds(one: dict[str, float | None], places: int) -> str:
    """Return an interval; ? for an end that the data don't bound."""
    low, high = ("?" if one[end] is None else f"{one[end]:.{places}f}" for end in ("low", "high"))
    return f"{low} to {high}"


def row(rung: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a rung, as in `HEAD`."""
    predicted, loss = rung["predicted"], rung["loss"]
    return (
        str(rung["dim"]),
        short(rung["parameters"]),
        short(rung["tokens"]),
        f"{rung['flops']:.1e}",
        f"{rung['seconds'] / 60:.1f}" if rung["runs"] else "",
        "" if loss is None else f"{loss:.4f}",
        "" if predicted is None else f"{predicted['value']:.4f}",
        "" if predicted is None else bounds(predicted, 3),
    )
