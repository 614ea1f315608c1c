"""Where a ladder is: the losses of its rungs, the law that they follow, and what it predicts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from meshwright.commands.experiment.results import Key, Result, folder_of
from meshwright.commands.experiment.state import State
from meshwright.commands.ladder.law import Array, Interval, Law, fit, least_points, why_no_law
from meshwright.commands.ladder.rungs import Ladder, Rung


@dataclass(frozen=True)
class LadderState(State):
    """Where a ladder is. Its runs are those of an experiment, and judged by a law."""

    ladder: Ladder

    def runs_of(self, rung: Rung) -> list[Result]:
        """Return the results of a rung, by seed."""
        keys = (Key(rung.name, seed) for seed in range(self.ladder.spec.seeds))
        return [self.results[key] for key in keys if key in self.results]

    @cached_property
    def losses(self) -> dict[str, float]:
        """The mean of the last validations of each rung that is complete, by name."""
        complete = {rung.name: self.runs_of(rung) for rung in self.ladder.rungs}
        return {
            name: fmean(run.curve[-1][1] for run in runs)
            for name, runs in complete.items()
            if len(runs) == self.ladder.spec.seeds and all(run.status == "finished" for run in runs)
        }

    def wanted(self, since_s: float) -> Iterator[Key]:
        """Yield the runs that are missing, from the smallest rung on."""
        done = self.done(since_s)
        keys = (
            Key(rung.name, seed)
            for rung in self.ladder.rungs
            for seed in range(self.ladder.spec.seeds)
        )
        yield from (key for key in keys if key not in done)

    def forecast(self, key: Key) -> str:
        """Return what the smaller rungs predict of a run."""
        place = [rung.name for rung in self.ladder.rungs].index(key.arm)
        law = self._law_before(place)
        if law is None:
            return ""
        value, low, high = law.predict(self.ladder.variables(self.ladder.rungs[place]))
        return f"{key.arm}: predicted {value:.4f}, {low:.4f} to {high:.4f}"

    def _law_before(self, place: int) -> Law | None:
        """Return the law of the first rungs; None: they are too few, or not all trained."""
        rungs = self.ladder.rungs[:place]
        is_known = all(rung.name in self.losses for rung in rungs)
        return self._fit(rungs) if is_known else None

    def _fit(self, rungs: list[Rung]) -> Law | None:
        if len(rungs) < least_points(len(self.ladder.terms)) - 1:
            return None
        return fit(*self._points(rungs))

    def _points(self, rungs: list[Rung]) -> tuple[Array, Array]:
        """Return the logs of the variables (n, k), and the losses (n)."""
        x = np.array([self.ladder.variables(rung) for rung in rungs])
        return x, np.array([self.losses[rung.name] for rung in rungs])

    @cached_property
    def law(self) -> Law | None:
        """The law of all rungs; None: not all are trained."""
        return self._law_before(len(self.ladder.rungs))

    @cached_property
    def backward(self) -> dict[str, Interval]:
        """What the smaller rungs predict of a rung, by its name."""
        rungs = self.ladder.rungs
        laws = [(rung, self._law_before(place)) for place, rung in enumerate(rungs)]
        return {
            rung.name: law.predict(self.ladder.variables(rung))
            for rung, law in laws
            if law is not None
        }

    @cached_property
    def no_law(self) -> str:
        """Why nothing is predicted; "": there is a law."""
        for rung in self.ladder.rungs:
            if any(run.status == "diverged" for run in self.runs_of(rung)):
                return f"{rung.name} diverged: lower optimizer.lr of the base"
        if self.law is None:
            missing = len(self.ladder.rungs) - len(self.losses)
            return f"{missing} of {len(self.ladder.rungs)} rungs aren't trained yet"
        return why_no_law(*self._points(self.ladder.rungs))

    def summary(self) -> dict[str, Any]:
        """Return the state as the object that `--json` prints."""
        ladder = self.ladder
        return {
            "ladder": str(ladder.document.file),
            "folder": str(ladder.document.folder),
            "metric": self.experiment.metric,
            "law": self.law and self._as_json(self.law),
            "no_law": self.no_law or None,
            "failed": [str(folder_of(self.document, Key(r.arm, r.seed))) for r in self.failed],
            "rungs": [self._rung_row(rung) for rung in (*ladder.rungs, *ladder.further)],
        }

    def _as_json(self, law: Law) -> dict[str, Any]:
        factors = zip("AB", law.coefficients(), strict=False)
        return {
            "variables": self.ladder.terms,
            **{name: _finite(interval) for name, interval in law.parameters().items()},
            **dict(factors),
            "error": law.scale,
            "explained": law.explained,
        }

    def _rung_row(self, rung: Rung) -> dict[str, Any]:
        is_further = rung in self.ladder.further
        runs = [] if is_further else self.runs_of(rung)
        predicted = self.backward.get(rung.name)
        if is_further and self.law is not None and not self.no_law:
            predicted = self.law.predict(self.ladder.variables(rung))
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


def _finite(interval: Interval) -> dict[str, float | None]:
    """Return an interval as JSON has it: null for an end that the data don't bound."""
    return {
        name: value if math.isfinite(value) else None for name, value in interval._asdict().items()
    }
