"""The runs of an experiment: their results, the verdicts on them, and which are wanted next."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from meshwright.commands.experiment.registry import Arm, Experiment
from meshwright.commands.experiment.spec import BASE, Document
from meshwright.commands.experiment.verdict import Pair, Verdict, alpha_of, judge
from meshwright.metrics.report.run import TOKENS, read_run
from meshwright.metrics.sinks import OF_A_RUN
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
    """diverged: its loss or gradient was not finite, so it stopped. failed: it crashed twice in a
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
    """Return the results of all runs that have one."""
    results = {}
    for arm in experiment.arms:
        for file in sorted((document.folder / arm).glob(f"seed-*/{RESULT}")):
            result = Result(**json.loads(text_of(file)))
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
        if read_results(document, experiment).keys() <= results.keys():
            return


def has_ended(folder: Path, steps: int) -> bool:
    """Return whether the run in a dump folder has taken all steps, and ended as it should."""
    if not (folder / METRICS).exists():
        return False
    run = read_run(folder)
    is_finished = bool(run.history) and run.history[-1].get("reason") == "finished"
    return is_finished and run.last("step") == steps


def judged(folder: Path, metric: str, steps: int) -> dict[str, Any]:
    """Return the fields of the result of a run that ended with exit code 0."""
    run = read_run(folder)
    curve = run.series(metric)
    late = [value for step, value in curve if step >= LAST_QUARTER * steps]
    if run.last("step") != steps:  # the data ended
        return {"status": "failed"}
    if curve[-1:] == [] or curve[-1][0] != steps:  # the last one isn't finite
        return {"status": "diverged"}
    return {
        "status": "finished",
        "value": fmean(late),
        "curve": curve,
        "tokens": run.last(TOKENS) or 0,
    }


@dataclass(frozen=True)
class State:
    """Where an experiment is."""

    document: Document
    experiment: Experiment
    results: dict[Key, Result]

    @property
    def seeds(self) -> range:
        """The seeds of the verdict."""
        return range(self.document.spec.seeds)

    def pairs_of(self, arm: Arm) -> Iterator[Pair]:
        """Yield the pairs of an arm in the order of seeds, up to the first that isn't there yet: so
        it doesn't matter which worker was faster."""
        for seed in self.seeds:
            reference = self.results.get(Key(arm.on, seed))
            own = self.results.get(Key(arm.name, seed))
            if reference is not None and reference.status != "finished":
                continue
            if reference is None or own is None:
                return
            if own.status == "diverged":
                yield Pair(math.inf)
            elif own.value is not None and reference.value is not None:
                yield Pair(own.value - reference.value, own.curve == reference.curve)

    @cached_property
    def arms(self) -> list[Arm]:
        """Arms to judge: not the base, nor one that was taken out of the TOML."""
        names = {request.name for request in self.document.requests()}
        arms = self.experiment.arms.values()
        return [arm for arm in arms if arm.is_added or arm.name in names]

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """By arm."""
        margin = self.document.spec.margin
        return {a.name: judge(self.pairs_of(a), alpha_of(a.number), margin) for a in self.arms}

    @property
    def open_arms(self) -> list[Arm]:
        """Arms that need more seeds."""
        return [self.experiment.arms[n] for n, v in self.verdicts.items() if v.word == "open"]

    def wanted(self, since_s: float) -> Iterator[Key]:
        """Yield the runs that are missing, seed by seed, each arm after its reference.

        Args:
            since_s: a failure before it is tried again.
        """
        active = {arm.name for arm in self.open_arms}
        for arm in reversed(self.experiment.arms.values()):
            if arm.name in active and arm.on:
                active.add(arm.on)
        for seed in self.seeds:
            for arm in self.experiment.arms.values():
                result = self.results.get(Key(arm.name, seed))
                reference = self.results.get(Key(arm.on, seed))
                is_paired = reference is None or reference.status == "finished"
                fails = result is not None and result.status == "failed"
                is_missing = result is None or (fails and result.ended_s < since_s)
                if arm.name in active and is_missing and is_paired:
                    yield Key(arm.name, seed)

    @property
    def failed(self) -> list[Result]:
        """Runs that crashed."""
        return [result for result in self.results.values() if result.status == "failed"]

    def summary(self) -> dict[str, Any]:
        """Return the state as the object that `--json` prints."""
        values = [r.value for r in self.results.values() if r.arm == BASE and r.value is not None]
        runs = [*self.results.values()]
        return {
            "experiment": str(self.document.file),
            "folder": str(self.document.folder),
            "metric": self.experiment.metric,
            "margin": self.document.spec.margin,
            "steps": self.experiment.steps_of(self.experiment.arms[BASE]),
            "is_decided": not self.open_arms,
            "finished": sum(run.status == "finished" for run in runs),
            "diverged": sum(run.status == "diverged" for run in runs),
            "failed": [str(folder_of(self.document, Key(r.arm, r.seed))) for r in self.failed],
            "base": {
                "seeds": len(values),
                "mean": fmean(values) if values else None,
                "spread": stdev(values) if len(values) > 1 else None,
            },
            "arms": [self._row(arm) for arm in self.arms],
        }

    def _row(self, arm: Arm) -> dict[str, Any]:
        verdict = asdict(self.verdicts[arm.name])
        return {
            "arm": arm.name,
            "number": arm.number,
            "on": arm.on,
            "keys": arm.asked,
            "verdict": verdict.pop("word"),
            **verdict,
            "alpha": alpha_of(arm.number),
            "unpaired": arm.unpaired,
        }
