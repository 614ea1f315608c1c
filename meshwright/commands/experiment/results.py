"""The runs of an experiment, and their results: in the folder of each, and in one file of all."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from meshwright.commands.experiment.registry import Experiment
from meshwright.commands.experiment.spec import Document
from meshwright.metrics.report.run import TOKENS, read_run
from meshwright.metrics.sinks import OF_A_RUN
from meshwright.system.errors import ConfigError
from meshwright.system.files import text_of, whole_file

RESULT, RESULTS = "result.json", "results.jsonl"
METRICS = OF_A_RUN[0]

LAST_QUARTER = 0.75
"""The number of a run is the mean of the validations from this part of its steps on. One validation
has up to three times their spread over seeds."""

VALIDATIONS = 12
"""Of a run, unless [common] sets `validation.freq`; four of them are in the last quarter."""


class Key(NamedTuple):
    """A run: an arm with a seed."""

    arm: str
    seed: int


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    arm: str
    seed: int
    status: Literal["finished", "diverged", "failed"]
    """diverged: its loss or gradient wasn't finite, so it stopped. failed: it crashed twice in a
    row; that is no result, and the next worker to start tries it again."""
    exit_code: int
    """Of `meshwright train`."""
    steps: int
    seconds: float
    """From the start of its last process to its end."""
    ended_s: float
    """Seconds of the epoch."""
    value: float | None = None
    """The mean of the metric over the last quarter; None unless finished."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Steps, and the metric in their validations."""
    tokens: int = 0


def folder_of(document: Document, key: Key) -> Path:
    """Return the dump folder of a run."""
    return document.folder / key.arm / f"seed-{key.seed}"


def read_results(document: Document, experiment: Experiment) -> dict[Key, Result]:
    """Return the results of all runs that have one.

    Raises:
        ConfigError: if one is damaged.
    """
    results = {}
    for arm in experiment.arms:
        for file in sorted((document.folder / arm).glob(f"seed-*/{RESULT}")):
            try:
                result = Result(**json.loads(text_of(file)))
            except (TypeError, ValueError) as error:
                fix = "remove it: the run is judged again"
                raise ConfigError("", f"{file}: is damaged: {error}\n  fix: {fix}") from None
            results[Key(arm, result.seed)] = result
    return results


def write_result(document: Document, experiment: Experiment, result: Result) -> None:
    """Keep a result in its run's folder, and then in the file of all results.

    No lock is needed: whoever reads an older set of results afterwards writes the file again.
    """
    with whole_file(folder_of(document, Key(result.arm, result.seed)) / RESULT) as file:
        file.write(json.dumps(asdict(result)).encode())
    while True:
        results = read_results(document, experiment)
        rows = sorted(results.values(), key=lambda one: (one.ended_s, one.arm, one.seed))
        text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        with whole_file(document.folder / RESULTS) as file:
            file.write(text.encode())
        if read_results(document, experiment) == results:
            return


def has_ended(folder: Path, steps: int) -> bool:
    """Return whether the run in a dump folder has taken all steps, and ended as it should."""
    if not (folder / METRICS).exists():
        return False
    run = read_run(folder)
    is_finished = bool(run.history) and run.history[-1].get("reason") == "finished"
    return is_finished and run.last("step") == steps


def late_mean(curve: Sequence[tuple[int, float]], steps: int) -> float:
    """Return the number of a run of so many steps, from its validations."""
    return fmean(value for step, value in curve if step >= LAST_QUARTER * steps)


def judged(folder: Path, metric: str, steps: int) -> dict[str, Any]:
    """Return the fields of the result of a run that ended with exit code 0."""
    run = read_run(folder)
    curve = run.series(metric)
    if run.last("step") != steps:  # the data ended
        return {"status": "failed"}
    if curve[-1:] == [] or curve[-1][0] != steps:  # the last one isn't finite
        return {"status": "diverged"}
    return {
        "status": "finished",
        "value": late_mean(curve, steps),
        "curve": curve,
        "tokens": run.last(TOKENS) or 0,
    }
