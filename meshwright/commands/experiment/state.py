"""Where an experiment is: the screening, the verdicts, and the runs that are wanted next."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, ClassVar, Self

from meshwright.commands.experiment.registry import Arm, Experiment, load
from meshwright.commands.experiment.results import (
    Key,
    Result,
    folder_of,
    late_mean,
    read_results,
)
from meshwright.commands.experiment.screening import Halving, halve, steps_at
from meshwright.commands.experiment.spec import BASE, Document
from meshwright.commands.experiment.verdict import Pair, Verdict, alpha_of, judge
from meshwright.system.errors import ConfigError, numbered
from meshwright.system.log import align

HEAD = ("arm", "pairs", "difference", "interval", "verdict")

NAMES = {"diverged": "worse: diverges", "identical": "identical: the same bits"}
"""Verdicts in words, where one isn't enough."""


@dataclass(frozen=True)
class State:
    """Where an experiment is."""

    document: Document
    experiment: Experiment
    results: dict[Key, Result]

    COMMAND: ClassVar = "experiment"

    @classmethod
    def of(cls, document: Document) -> Self:
        """Read where it is.

        Raises:
            ConfigError: if nothing has run.
        """
        experiment = load(document)
        if experiment is None:
            what = f"{document.folder}: holds no {cls.COMMAND} yet"
            raise ConfigError("", f"{what}\n  fix: meshwright {cls.COMMAND} run {document.file}")
        return cls(document, experiment, read_results(document, experiment))

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
            elif own.status == "finished":
                # up to the start of a branch both are the same, and one may have no validations
                ours, theirs = (
                    [point for point in one.curve if point[0] > arm.branch]
                    for one in (own, reference)
                )
                difference = late_mean(ours, own.steps) - late_mean(theirs, reference.steps)
                yield Pair(difference, ours == theirs)

    @cached_property
    def screening(self) -> Halving | None:
        """The screening of the TOML's arms; None: there is none."""
        screen, own = self.document.spec.screen, self.experiment.steps_of
        return halve(screen, self._of_toml, own, self.results) if screen is not None else None

    @property
    def _of_toml(self) -> list[Arm]:
        names = {request.name for request in self.document.requests()}
        return [arm for arm in self.experiment.arms.values() if arm.name in names]

    @cached_property
    def arms(self) -> dict[str, int]:
        """The numbers of the arms to judge, by name: of the TOML's arms, or the survivors of their
        screening; and of added ones."""
        added = [arm for arm in self.experiment.arms.values() if not arm.place]
        if self.screening is None:
            return {arm.name: arm.number for arm in [*self._of_toml, *added]}
        survivors = [] if self.screening.part else self.screening.left
        numbers = {arm.name: number for number, arm in enumerate(survivors, 1)}
        first = self.screening.keep + 1
        return numbers | {arm.name: number for number, arm in enumerate(added, first)}

    def steps_of(self, key: Key) -> int:
        """Return the steps of a run."""
        steps = self.experiment.steps_of(self.experiment.arms[key.arm])
        if key.seed in self.seeds or self.screening is None:
            return steps
        return steps_at(self.screening.part, steps)

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """By arm."""
        margin = self.document.spec.margin
        return {
            name: judge(self.pairs_of(self.experiment.arms[name]), alpha_of(number), margin)
            for name, number in self.arms.items()
        }

    @property
    def open_arms(self) -> list[Arm]:
        """Arms that need more seeds."""
        return [self.experiment.arms[n] for n, v in self.verdicts.items() if v.word == "open"]

    def done(self, since_s: float) -> set[Key]:
        """Return the runs that have ended; a failure before `since_s` is tried again."""
        return {
            key
            for key, run in self.results.items()
            if run.status != "failed" or run.ended_s >= since_s
        }

    def forecast(self, key: Key) -> str:
        """Return a line to print before a run; "": there is none."""
        return ""

    def wanted(self, since_s: float) -> Iterator[Key]:
        """Yield the runs that are missing, seed by seed, each arm after its reference.

        Args:
            since_s: a failure before it is tried again.
        """
        done = self.done(since_s)
        if self.screening is not None:
            failed = {key for key in done if self.results[key].status == "failed"}
            yield from (key for key in self.screening.missing if key not in failed)
        active = {arm.name for arm in self.open_arms}
        for arm in reversed(self.experiment.arms.values()):
            if arm.name in active and arm.on:
                active.add(arm.on)
        for seed in self.seeds:
            for arm in self.experiment.arms.values():
                key, reference = Key(arm.name, seed), self.results.get(Key(arm.on, seed))
                # a branch waits for the checkpoint that it starts from
                is_paired = not arm.branch if reference is None else reference.status == "finished"
                if arm.name in active and is_paired and key not in done:
                    yield key

    @property
    def is_open(self) -> bool:
        """Whether an arm isn't decided, or a screening goes on."""
        return bool(self.open_arms or (self.screening is not None and self.screening.part))

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
            "is_decided": not self.is_open,
            "finished": sum(run.status == "finished" for run in runs),
            "diverged": sum(run.status == "diverged" for run in runs),
            "failed": [str(folder_of(self.document, Key(r.arm, r.seed))) for r in self.failed],
            "base": {
                "seeds": len(values),
                "mean": fmean(values) if values else None,
                "spread": stdev(values) if len(values) > 1 else None,
            },
            "screening": self.screening
            and {
                "part": self.screening.part,
                "left": [arm.name for arm in self.screening.left],
                "dropped": self.screening.dropped,
            },
            "arms": [self._row(self.experiment.arms[name]) for name in self.arms],
        }

    def _row(self, arm: Arm) -> dict[str, Any]:
        verdict = asdict(self.verdicts[arm.name])
        return {
            "arm": arm.name,
            "number": self.arms[arm.name],
            "on": arm.on,
            "from": arm.branch or None,
            "keys": arm.asked,
            "verdict": verdict.pop("word"),
            **verdict,
            "alpha": alpha_of(self.arms[arm.name]),
            "unpaired": arm.unpaired,
        }

    def text(self) -> str:
        """Return the state as lines to print."""
        summary = self.summary()
        base, screening = summary["base"], summary["screening"]
        mean = "no run yet" if base["mean"] is None else f"{base['mean']:.4f}"
        mean += f", spread {base['spread']:.2g}" if base["spread"] else ""
        lines = [f"{summary['metric']} after {summary['steps']:,} steps; base: {mean}"]
        lines.append(align([HEAD, *map(cells, summary["arms"])]))
        if screening:
            dropped = ", ".join(screening["dropped"]) or "none"
            lines.append(f"screening: {len(screening['left'])} left, dropped: {dropped}")
        return "\n".join([*lines, *(f"failed: {folder}" for folder in summary["failed"])])


def cells(arm: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of an arm of a summary, as in `HEAD`."""
    word = NAMES.get(arm["verdict"], arm["verdict"])
    if word == "open":
        needed = arm["seeds_needed"]
        word += f": {numbered(needed, 'seed')} at this spread" if needed else ": no end in sight"
    if arm["unpaired"]:
        word += f" (paired by seed only: other {' and '.join(arm['unpaired'])})"
    is_bounded = arm["low"] is not None and arm["high"] is not None
    return (
        arm["arm"],
        str(arm["num_pairs"]),
        "" if arm["mean"] is None else f"{arm['mean']:+.4f}",
        f"{arm['low']:+.4f} to {arm['high']:+.4f}" if is_bounded else "",
        word,
    )
