"""Runs cases one after the other, judges each, and shows the proof on the console and in files."""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import meshwright
from meshwright.commands.prove.cases import Case, Kind, reference_case
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.compare import (
    BOUNDS,
    GRADIENT_BOUND,
    MEANINGS,
    Reference,
    Verdict,
    bounds_of,
    compare,
)
from meshwright.commands.prove.measure import COMPARED, measure, record_reference
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.config.job_config import JobConfig
from meshwright.parallelisms.rules.compile_choice import why_no_compiler
from meshwright.system.errors import config_error

RANK_TIMEOUT_S = 300
"""For a collective: ranks compile side by side on few cores."""

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Row:
    """A case and its result."""

    case: Case
    verdict: Verdict
    seconds: float


def prove(small: JobConfig, cases: Sequence[Case]) -> Iterator[Row]:
    """Run `small` on one process, then every case on real ranks; a row as each is done.

    Ranks of a pool are kept for all cases of its size, and only one size lives at a time.
    """
    # Ranks compile code without vectors. For each kind of vectors inductor would have every rank,
    # one after the other, load a trial in a process that imports torch: up to ten, for a minute.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    pool: RankPool | None = None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with contextlib.closing(RankPool(1, RANK_TIMEOUT_S)) as alone:
            kinds = {case.kind for case in cases}
            references = record_references(alone.run, small, kinds, Path(folder))
        for case in sorted(cases, key=lambda case: case.world_size):
            if reason := _why_not(case):
                yield Row(case, Verdict(not_run=reason), 0.0)
                continue
            if pool is None or pool.world_size != case.world_size:
                stack.close()
                pool = RankPool(case.world_size, RANK_TIMEOUT_S)
                stack.callback(pool.close)
            start = time.perf_counter()
            reference, file = references[case.kind]
            try:
                ranks = pool.run(measure, case.config, case.world_size, file)
                verdict = compare(reference, ranks, bounds_of(case))
            except RankError as error:  # a case that fails on the way takes its ranks with it
                verdict, pool = Verdict([f"stopped: {error}"]), None
            yield Row(case, verdict, time.perf_counter() - start)


def _why_not(case: Case) -> str:
    """Return why this machine cannot run the case; "" if it can."""
    compilation = case.config.compile  # a case with "auto" has an option that needs the compiler
    starts_compiler = compilation.enable is not False and compilation.backend == "inductor"
    return why_no_compiler() if starts_compiler else ""


def record_references(
    run: Run, small: JobConfig, kinds: set[Kind], folder: Path
) -> dict[Kind, tuple[Reference, Path]]:
    """One process's measurement for each of `kinds`, and the file of its tensors.

    Args:
        run: as `RankPool.run`, of a single rank.
    """
    in_fp32 = _record(run, reference_case(small), folder / "fp32.pt")
    found: dict[Kind, tuple[Reference, Path]] = {"fp32": in_fp32}
    if kinds - {"fp32"}:
        in_bf16 = _record(run, reference_case(small, "bf16"), folder / "bf16.pt", in_fp32[1])
        found |= {"bf16": in_bf16, "bf16 sums": in_bf16}
    if "user types" in kinds:
        case = reference_case(small, "user types")
        found["user types"] = _record(run, case, folder / "user_types.pt", found["bf16"][1])
    return found


def _record(run: Run, case: Case, file: Path, exact: Path | None = None) -> tuple[Reference, Path]:
    """Run one process and read its output.

    Args:
        exact: file of the same in wider types, if there is one.
    """
    (seen,) = run(record_reference, case.config, file)
    tensors = torch.load(file, weights_only=True)
    norms = {
        kind: {name: tensor.double().norm().item() for name, tensor in tensors[kind].items()}
        for kind in COMPARED
    }
    roundings: dict[str, dict[str, float]] = {}
    wide = {} if exact is None else torch.load(exact, weights_only=True)
    for kind in ("gradients", "updates") if wide else ():
        errors: dict[str, float] = {}
        for name, tensor in tensors[kind].items():
            difference = (tensor.double() - wide[kind][name].double()).norm().item()
            errors[name] = difference / (norms[kind][name] or 1)
        roundings[kind] = _largest_of_layers(errors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors["weights"].items()}
    gradients = tensors["gradients"].items()
    in_bf16 = {name for name, gradient in gradients if gradient.dtype == torch.bfloat16}
    return Reference(seen, shapes, norms, roundings, in_bf16), file


def _largest_of_layers(errors: Mapping[str, float]) -> dict[str, float]:
    """Return for each parameter the largest error of its name in all layers.

    One error is one draw: of a norm with few elements it may be small by chance.
    """
    layers = {name: re.sub(r"\.\d+\.", ".*.", name) for name in errors}
    largest: dict[str, float] = {}
    for name, error in errors.items():
        largest[layers[name]] = max(error, largest.get(layers[name], 0.0))
    return {name: largest[layer] for name, layer in layers.items()}


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


def explanation(columns: Collection[str] = COLUMNS) -> str:
    """Return the meaning of `columns`, one line each."""
    lines = [f"{name}: {text}" for name, text in MEANINGS.items() if name in columns]
    head = "Every case trains the same small model as one process does."
    return "\n".join([head, *lines, "docs/correctness.md derives the bounds, and those of bf16."])


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text, in the order of `COLUMNS`; "-" for quantities that are not known."""
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


def write(
    folder: Path,
    small: JobConfig,
    rows: Sequence[Row],
    num_cases: int,
    checked: Checked | None = None,
) -> None:
    """Write `proof.json`, and `proof.md` with the table and its meaning.

    Args:
        rows: of the cases so far.
        num_cases: with the ones that are still to run.
        checked: the reference against plain PyTorch; None: not yet.

    Raises:
        ConfigError: if the folder cannot be written to.
    """
    reference = checked or Checked()
    is_equal = len(rows) == num_cases and all(cells(row)[-1] == "equal" for row in rows)
    proof = {
        "proved": is_equal and not reference.failures,
        "num_cases": num_cases,
        "summary": summary(rows, num_cases),
        "versions": {"meshwright": meshwright.__version__, "torch": torch.__version__},
        "bounds": {kind: dataclasses.asdict(bounds) for kind, bounds in BOUNDS.items()},
        "config": small.model_dump(),
        "reference": reference.record,
        "cases": [
            {
                "name": row.case.name,
                "ranks": row.case.world_size,
                "verdict": cells(row)[-1],
                "bounds": row.case.bounds,
                "seconds": round(row.seconds, 2),
                **dataclasses.asdict(row.verdict),
            }
            for row in rows
        ],
    }
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(cells(row) for row in rows)]
    table = "".join(f"| {' | '.join(texts)} |\n" for texts in lines)
    failures = [f"- reference: {text}\n" for text in reference.failures]
    failures += [f"- {row.case.name}: {text}\n" for row in rows for text in row.verdict.failures]
    head = [
        summary(rows, num_cases),
        f"Reference against plain PyTorch: {reference.row}.",
        explanation(),
    ]
    text = "\n\n".join([*head, table, "".join(failures)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "proof.json").write_text(json.dumps(proof, indent=1), "utf-8")
        (folder / "proof.md").write_text(f"{text.rstrip()}\n", "utf-8")
    except OSError as error:
        rule = f"cannot be written to: {error.strerror}"
        raise config_error("--output", str(folder), rule, "name another folder") from None
