"""A proof for people (a table, a page) and for programs (JSON)."""

import dataclasses
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

import meshwright
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.html.document import document, table
from meshwright.proof.compare import BOUNDS
from meshwright.proof.prove import Row

COLUMNS = (
    *("case", "ranks", "weights", "batches", "loss", "norm", "gradient", "of", "update"),
    *("validation", "resume", "seconds", "verdict"),
)
ON_CONSOLE = {
    "case": 44,
    "weights": 7,
    "batches": 7,
    "loss": 7,
    "gradient": 8,
    "resume": 6,
    "verdict": 7,
}
"""Width of each column that fits a console of 100 columns."""
FP32 = BOUNDS["fp32"]
EXPLANATION = (
    "Every case trains the same small model as one process does. weights, batches: how many "
    "initial weights and samples differ, bit by bit. loss, norm: largest relative error of the "
    "loss and of the gradient norm, over all steps and ranks. gradient: largest relative error "
    "(norm of the difference over norm) of a parameter's gradient at step 1, and the parameter. "
    "update: the same of the sum of its first updates. validation: largest relative error of its "
    "figures. resume: tensors and figures that a save and a resume have changed, bit by bit. "
    f"Bounds of cases in fp32: 0, 0, {FP32.loss:g}, {FP32.grad_norm:g}, {FP32.gradient:g}, "
    f"{FP32.update:g}, {FP32.later_loss:g}, 0; "
    "docs/proof.md derives them, and those of bf16."
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text, in the order of `COLUMNS`."""
    verdict = row.verdict
    return (
        row.case.name,
        str(row.case.world_size),
        str(verdict.num_different_weights),
        str(verdict.num_different_samples),
        f"{verdict.loss_error:.1e}",
        f"{verdict.norm_error:.1e}",
        f"{verdict.gradient_error:.1e}",
        verdict.worst_gradient or "-",
        f"{verdict.update_error:.1e}",
        f"{verdict.validation_error:.1e}",
        str(verdict.num_different_resumed),
        f"{row.seconds:.1f}",
        "FAILED" if verdict.failures else "equal",
    )


def line(texts: Sequence[str]) -> str:
    """Return a row of the table for a console; a long name has a line of its own."""
    shown = dict(zip(COLUMNS, texts, strict=True))
    name = shown["case"]
    if len(name) > ON_CONSOLE["case"]:
        return f"{name}\n{line(['', *texts[1:]])}"
    return "  ".join(shown[column].ljust(width) for column, width in ON_CONSOLE.items()).rstrip()


def write(folder: Path, small: JobConfig, rows: Sequence[Row]) -> None:
    """Write `proof.json`, `proof.html` and `proof.md` (the table alone, for documents)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "proof.json").write_text(json.dumps(_as_json(small, rows), indent=1), "utf-8")
    (folder / "proof.html").write_text(_as_html(small, rows), "utf-8")
    timeless = [index for index, name in enumerate(COLUMNS) if name != "seconds"]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(cells(row) for row in rows)]
    table = ["| " + " | ".join(texts[index] for index in timeless) + " |" for texts in lines]
    (folder / "proof.md").write_text("\n".join(table) + "\n", "utf-8")


def _as_json(small: JobConfig, rows: Sequence[Row]) -> dict[str, object]:
    return {
        "proved": not any(row.verdict.failures for row in rows),
        "versions": {"meshwright": meshwright.__version__, "torch": torch.__version__},
        "bounds": {kind: dataclasses.asdict(bounds) for kind, bounds in BOUNDS.items()},
        "config": small.model_dump(),
        "cases": [
            {
                "name": row.case.name,
                "ranks": row.case.world_size,
                "bounds": row.case.bounds,
                "seconds": round(row.seconds, 2),
                **dataclasses.asdict(row.verdict),
            }
            for row in rows
        ],
    }


def _as_html(small: JobConfig, rows: Sequence[Row]) -> str:
    kinds = ["bad" if row.verdict.failures else "good" for row in rows]
    title = f"{kinds.count('good')} of {len(rows)} cases equal one process"
    failures = "".join(
        f"<h2>{escape(row.case.name)}</h2><ul>"
        + "".join(f"<li><pre>{escape(text)}</pre></li>" for text in row.verdict.failures)
        + "</ul>"
        for row in rows
        if row.verdict.failures
    )
    return document(
        title,
        f"<h1>{title}</h1><p>{escape(EXPLANATION)}</p>"
        f"{table(COLUMNS, map(cells, rows), kinds)}{failures}"
        f"<h2>Versions</h2><p>meshwright {meshwright.__version__}, torch {torch.__version__}</p>"
        f"<h2>The small job</h2><pre>{escape(to_toml(small, True))}</pre>",
    )
