"""A proof for people (a table) and for programs (JSON)."""

import dataclasses
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

import meshwright
from meshwright.commands.prove.compare import BOUNDS
from meshwright.commands.prove.prove import Row
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import config_error
from meshwright.system.log import console_width

COLUMNS = (
    *("case", "ranks", "weights", "batches", "loss", "norm", "gradient", "of", "update"),
    *("validation", "resume", "seconds", "verdict"),
)

ON_CONSOLE = {
    "case": 36,
    "weights": 7,
    "batches": 7,
    "loss": 7,
    "gradient": 8,
    "resume": 6,
    "verdict": 7,
}
"""Width of each column that fits a console of 100 columns, after the number of the case."""

FP32 = BOUNDS["fp32"]

MEANINGS = {
    "weights": "initial weights that differ, bit by bit (bound: 0)",
    "batches": "samples that differ, bit by bit (bound: 0)",
    "loss": "largest relative error of the loss, over all steps and ranks "
    f"(bound in fp32: {FP32.loss:g})",
    "norm": f"the same of the gradient norm ({FP32.grad_norm:g})",
    "gradient": "largest relative error of a parameter's gradient at step 1, as norm of the "
    f"difference over norm ({FP32.gradient:g})",
    "of": "the parameter with that error",
    "update": f"the same error of the sum of a parameter's first updates ({FP32.update:g})",
    "validation": f"largest relative error of its figures ({FP32.later_loss:g})",
    "resume": "tensors and figures that a save and a resume have changed, bit by bit (bound: 0)",
}
"""By column."""


def explanation(columns: Collection[str] = COLUMNS) -> str:
    """Return the meaning of `columns`, one line each."""
    lines = [f"{name}: {text}" for name, text in MEANINGS.items() if name in columns]
    head = "Every case trains the same small model as one process does."
    return "\n".join([head, *lines, "docs/correctness.md derives the bounds, and those of bf16."])


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text, in the order of `COLUMNS`."""
    verdict = row.verdict
    figures: tuple[str, ...] = (
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
    )
    if verdict.not_run:
        figures = ("-",) * len(figures)
    result = "FAILED" if verdict.failures else "not run" if verdict.not_run else "equal"
    return row.case.name, str(row.case.world_size), *figures, result


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
    """Return a row of the table for a console; a long name has a line of its own.

    Args:
        number: of the case, e.g. "3/11".
    """
    shown = dict(zip(COLUMNS, texts, strict=True))
    name, others = shown["case"], sum(ON_CONSOLE.values()) - ON_CONSOLE["case"]
    room = console_width(sys.stdout) - len(number) - others - 2 * len(ON_CONSOLE)
    widths = ON_CONSOLE | {"case": max(0, min(room, ON_CONSOLE["case"]))}
    if len(name) > widths["case"]:
        return f"{number}  {name}\n{line(' ' * len(number), ['', *texts[1:]])}"
    row = "  ".join(shown[column].ljust(width) for column, width in widths.items())
    return f"{number}  {row}".rstrip()


def write(folder: Path, small: JobConfig, rows: Sequence[Row], num_cases: int) -> None:
    """Write `proof.json`, and `proof.md` with the table and its meaning.

    Args:
        rows: of the cases so far.
        num_cases: with those that are still to run.

    Raises:
        ConfigError: if the folder cannot be written to.
    """
    proof = {
        "proved": len(rows) == num_cases and all(cells(row)[-1] == "equal" for row in rows),
        "num_cases": num_cases,
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
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(cells(row) for row in rows)]
    table = "".join(f"| {' | '.join(texts)} |\n" for texts in lines)
    failures = [f"- {row.case.name}: {text}\n" for row in rows for text in row.verdict.failures]
    text = "\n\n".join([summary(rows, num_cases), explanation(), table, "".join(failures)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "proof.json").write_text(json.dumps(proof, indent=1), "utf-8")
        (folder / "proof.md").write_text(f"{text.rstrip()}\n", "utf-8")
    except OSError as error:
        rule = f"cannot be written to: {error.strerror}"
        raise config_error("--output", str(folder), rule, "name another folder") from None
