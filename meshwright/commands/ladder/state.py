"""Where a ladder is: the losses of its rungs, the law that they follow, and what it predicts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from meshwright.commands.experiment.results import Key, Result, folder_of
from meshwright.commands.experiment.state import State
from meshwright.commands.ladder.law import Array, Interval, Law, fit, least_points, why_no_law
from meshwright.commands.ladder.rungs import Ladder, Rung
from meshwright.commands.ladder.text import HEAD, describe, row
from meshwright.system.log import align


@dataclass(frozen=True)
class LadderState(State):
    """Where a ladder is. Its runs are those of an experiment, and judged by a law."""

    document: Ladder

    COMMAND: ClassVar = "ladder"

    def keys_of(self, rung: Rung) -> list[Key]:
        """Return the runs of a rung, by seed."""
        return [Key(rung.name, seed) for seed in range(self.document.own.seeds)]

    def runs_of(self, rung: Rung) -> list[Result]:
        """Return the results of a rung so far."""
        return [self.results[key] for key in self.keys_of(rung) if key in self.results]

    @cached_property
    def losses(self) -> dict[str, float]:
        """The mean of the last validations of each rung that is complete, by name."""
        runs = {rung.name: self.runs_of(rung) for rung in self.document.rungs}
        return {
            name: fmean(run.curve[-1][1] for run in own)
            for name, own in runs.items()
            if [run.status for run in own] == ["finished"] * self.document.own.seeds
        }

    def wanted(self, since_s: float) -> Iterator[Key]:
        """Yield the runs that are missing, from the smallest rung on."""
        done = self.done(since_s)
        keys = (key for rung in self.document.rungs for key in self.keys_of(rung))
        yield from (key for key in keys if key not in done)

    def law_of(self, rungs: Sequence[Rung]) -> Law | None:
        """Return the law of some rungs; None: they are too few, or not all trained."""
        is_known = all(rung.name in self.losses for rung in rungs)
        is_enough = len(rungs) >= least_points(len(self.document.terms)) - 1
        return fit(*self._points(rungs)) if is_known and is_enough else None

    def _points(self, rungs: Sequence[Rung]) -> tuple[Array, Array]:
        """Return the logs of the variables (n, k), and the losses (n)."""
        x = np.array([self.document.variables(rung) for rung in rungs])
        return x, np.array([self.losses[rung.name] for rung in rungs])

    @cached_property
    def law(self) -> Law | None:
        """The law of all rungs; None: not all are trained."""
        return self.law_of(self.document.rungs)

    @cached_property
    def no_law(self) -> str:
        """Why nothing is predicted; "": there is a law."""
        rungs = self.document.rungs
        for rung in rungs:
            if any(run.status == "diverged" for run in self.runs_of(rung)):
                return f"{rung.name} diverged: lower optimizer.lr of the base"
        if self.law is None:
            return f"{len(rungs) - len(self.losses)} of {len(rungs)} rungs aren't trained yet"
        return why_no_law(*self._points(rungs))

    @property
    def is_open(self) -> bool:
        """Whether nothing is predicted."""
        return bool(self.no_law)

    def prediction(self, rung: Rung) -> Interval | None:
        """Return what the smaller rungs predict of a rung, or what all of them do of a further one;
        None: they can't tell."""
        rungs = self.document.rungs
        if rung in rungs:
            law = self.law_of(rungs[: rungs.index(rung)])
        else:
            law = None if self.no_law else self.law
        return None if law is None else law.predict(self.document.variables(rung))

    def forecast(self, key: Key) -> str:
        """Return what the smaller rungs predict of a run."""
        (rung,) = (rung for rung in self.document.rungs if rung.name == key.arm)
        predicted = self.prediction(rung)
        if predicted is None:
            return ""
        value, low, high = predicted
        return f"{key.arm}: predicted {value:.4f}, {low:.4f} to {high:.4f}"

    def summary(self) -> dict[str, Any]:
        """Return the state as the object that `--json` prints."""
        ladder = self.document
        return {
            "ladder": str(ladder.file),
            "folder": str(ladder.folder),
            "metric": self.experiment.metric,
            "law": self.law and self._as_json(self.law),
            "no_law": self.no_law or None,
            "failed": [str(folder_of(ladder, Key(r.arm, r.seed))) for r in self.failed],
            "rungs": [self._rung_row(rung) for rung in (*ladder.rungs, *ladder.further)],
        }

    def _as_json(self, law: Law) -> dict[str, Any]:
        return {
            "variables": self.document.terms,
            **{name: _finite(interval) for name, interval in law.parameters().items()},
            **dict(zip("AB", law.coefficients(), strict=False)),
            "error": law.scale,
            "explained": law.explained,
        }

    def _rung_row(self, rung: Rung) -> dict[str, Any]:
        runs, predicted = self.runs_of(rung), self.prediction(rung)
        return {
            "rung": rung.name,
            "dim": rung.dim,
            "n_layers": rung.keys["model.args.n_layers"],
            "tokens_per_parameter": rung.ratio,
            "parameters": rung.parameters,
            "tokens": rung.tokens,
            "flops": rung.flops,
            "steps": rung.steps,
            "lr": rung.keys["optimizer.lr"],
            "global_batch_size": rung.keys["training.global_batch_size"],
            "runs": len(runs),
            "seconds": sum(run.seconds for run in runs),
            "loss": self.losses.get(rung.name),
            "predicted": predicted and _finite(predicted),
        }

    def text(self) -> str:
        """Return the state as lines to print."""
        summary = self.summary()
        lines = [describe(summary["law"])] if summary["law"] else []
        lines.append(align([HEAD, *map(row, summary["rungs"])]))
        if summary["no_law"]:
            lines.append(f"no prediction: {summary['no_law']}")
        return "\n".join([*lines, *(f"failed: {folder}" for folder in summary["failed"])])


def _finite(interval: Interval) -> dict[str, float | None]:
    """Return an interval as JSON has it: null for an end that the data don't bound."""
    return {
        name: value if math.isfinite(value) else None for name, value in interval._asdict().items()
    }
