"""Shows a proof on the console and in files."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import meshwright
from meshwright.commands.prove.bounds import BOUNDS
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.properties import Property
from meshwright.commands.prove.prove import Row
from meshwright.commands.prove.verdict import GRADIENT_BOUND, MEANINGS
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import config_error

COLUMNS = ("case", "ranks", *MEANINGS, "seconds", "verdict")

ON_CONSOLE = {
    "weights": 7,
    "batches": 7,
    "loss": 7,
    "gradient": 17,
    "resume": 6,
    "verdict": 7,
    "case": 0,
}
"""Width of each column that the console has. The name of a case is last: it may be long."""


def explanation(small: JobConfig, columns: Collection[str] = COLUMNS) -> str:
    """Return the meaning of `columns`, one line each, for the job `small`."""
    lines = [f"{name}: {text}" for name, text in MEANINGS.items() if name in columns]
    head = "Every case trains the same small model as one process does."
    if small.float8.enable and small.float8.recipe_name == "tensorwise":
        bounds = BOUNDS["float8"]
        lines.append(
            "float8, tensorwise: where ranks have other tokens in a microbatch, these have another "
            f"scale, and all are rounded anew: {bounds.rounding:g} errors of rounding is the bound "
            f"of a gradient, and {bounds.loss:g} of the loss"
        )
    return "\n".join([head, *lines, "docs/correctness.md derives the bounds, and those of bf16."])


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text, in the order of `COLUMNS`; "-" for quantities that aren't known."""
    verdict = row.verdict
    result = "FAILED" if verdict.failures else "not run" if verdict.not_run else "equal"
    texts = {name: _cell(verdict.errors.get(name, "")) for name in MEANINGS}
    if GRADIENT_BOUND in verdict.errors:
        error, bound = (verdict.errors[name] for name in ("gradient", GRADIENT_BOUND))
        texts["gradient"] = f"{error:.3g} of {bound:.2g}"
    seconds = "-" if verdict.not_run else f"{row.seconds:.1f}"
    return row.case.name, str(row.case.world_size), *texts.values(), seconds, result


def _cell(value: float | str) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value) or "-"


def summary(rows: Sequence[Row], num_cases: int) -> str:
    """Return how many of `num_cases` are equal, e.g. "9 of 11 cases equal one process, 2 not run".

    Args:
        rows: of the cases so far.
    """
    num_equal = sum(cells(row)[-1] == "equal" for row in rows)
    num_not_run = num_cases - len(rows) + sum(bool(row.verdict.not_run) for row in rows)
    text = f"{num_equal} of {num_cases} cases equal one process"
    return f"{text}, {num_not_run} not run" if num_not_run else text


def line(number: str, texts: Sequence[str]) -> str:
    """Return a row of the table for a console.

    Args:
        number: of the case, e.g. "3/11".
    """
    shown = dict(zip(COLUMNS, texts, strict=True))
    row = "  ".join(shown[column].ljust(width) for column, width in ON_CONSOLE.items())
    return f"{number}  {row}"


PROPERTY_COLUMNS = {"property": 9, "error": 7, "bound": 5, "verdict": 7, "what holds": 0}
"""Of the table of properties, and the width of each on the console."""


def property_cells(one: Property) -> tuple[str, ...]:
    """Return a property as text, in the order of `PROPERTY_COLUMNS`."""
    return one.name, f"{one.error:.2g}", f"{one.bound:g}", one.verdict, one.detail


def property_line(texts: Sequence[str]) -> str:
    """Return a row of the table of properties for a console."""
    widths = PROPERTY_COLUMNS.values()
    return "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()


def _markdown(columns: Collection[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or nothing if it has no row."""
    lines = [columns, ["---"] * len(columns), *rows] if rows else []
    return "".join(f"| {' | '.join(texts)} |\n" for texts in lines)


def write(
    folder: Path,
    small: JobConfig,
    rows: Sequence[Row],
    num_cases: int,
    checked: Checked | None = None,
    properties: Sequence[Property] = (),
    *,
    gpus: int = 0,
) -> None:
    """Write `proof.json`, and `proof.md` with the table and its meaning.

    Args:
        rows: of the cases so far.
        num_cases: with the ones that are still to run.
        checked: the reference against plain PyTorch; None: not yet.
        properties: of the model on one process; empty: not yet.
        gpus: that this machine has for the ranks; 0: they run on CPUs.

    Raises:
        ConfigError: if the folder can't be written to.
    """
    reference = checked or Checked()
    is_equal = len(rows) == num_cases and all(cells(row)[-1] == "equal" for row in rows)
    has_failed = bool(reference.failures) or any(one.failures for one in properties)
    proof = {
        "proved": is_equal and not has_failed,
        "num_cases": num_cases,
        "gpus": gpus,
        "summary": summary(rows, num_cases),
        "versions": {"meshwright": meshwright.__version__, "torch": torch.__version__},
        "bounds": {kind: asdict(bounds) for kind, bounds in BOUNDS.items()},
        "config": small.model_dump(),
        "reference": reference.record,
        "properties": [{**asdict(one), "verdict": one.verdict} for one in properties],
        "cases": [
            {
                "name": row.case.name,
                "ranks": row.case.world_size,
                "verdict": cells(row)[-1],
                "bounds": row.case.bounds,
                "seconds": round(row.seconds, 2),
                **asdict(row.verdict),
            }
            for row in rows
        ],
    }
    failures = [f"- reference: {text}\n" for text in reference.failures]
    failures += [f"- {one.name}: {text}\n" for one in properties for text in one.failures]
    failures += [f"- {row.case.name}: {text}\n" for row in rows for text in row.verdict.failures]
    parts = [
        summary(rows, num_cases),
        f"Reference against plain PyTorch: {reference.row}.",
        _markdown(PROPERTY_COLUMNS, [property_cells(one) for one in properties]),
        explanation(small),
        _markdown(COLUMNS, [cells(row) for row in rows]),
        "".join(failures),
    ]
    text = "\n\n".join(filter(None, parts))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "proof.json").write_text(json.dumps(proof, indent=1), "utf-8")
        (folder / "proof.md").write_text(f"{text.rstrip()}\n", "utf-8")
    except OSError as error:
        rule = f"cannot be written to: {error.strerror}"
        raise config_error("--output", str(folder), rule, "choose a different folder") from None
