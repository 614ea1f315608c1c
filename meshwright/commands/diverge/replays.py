"""Takes an interval of steps again with the facts of two runs, each in a process with its code."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from meshwright.checkpoint import listing
from meshwright.commands.diverge.checkpoints import Element
from meshwright.commands.diverge.flips import Known
from meshwright.commands.diverge.trace import OtherValue, first_other_value
from meshwright.commands.diverge.tries import Flip
from meshwright.commands.diverge.worker import Interval, take_all
from meshwright.commands.replay.compared import ComparedStep, ComparedSteps
from meshwright.commands.replay.recorded import RecordedRun, held
from meshwright.config.changes import changed, with_values
from meshwright.config.job_config import Update
from meshwright.config.loader import to_toml
from meshwright.metrics.report.run import Row
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.modules import source_hash

START = "import sys; from meshwright.commands.diverge.worker import main; main(*sys.argv[1:])"

PLAIN: Update = {"compile": {"enable": False}, "activation_checkpoint": {"mode": "none"}}
"""Modules are watched: compiled ones are no calls, and recomputed ones are called twice."""

MOST_BEHIND = 3
"""Steps behind one with a flipped bit in which it has to explain the record, too."""

Steps = Mapping[int, Row]

Taken = Mapping[str, Any]
"""As `worker` gives it."""


@dataclass(frozen=True)
class Findings:
    """What one process makes of an interval."""

    is_off: tuple[int | None, int | None]
    """The first step of A, and of B, that isn't as recorded, by more than rounding."""
    crossed: int | None
    """The first step that the facts of B change, taken from A's checkpoint."""
    rounding: float
    """Largest relative difference of the twin of A."""
    traced: int
    """The step whose values were compared."""
    value: OtherValue | None
    """The first value of the traced step that the facts of B change."""
    source_b: str
    """Hash of the code that has taken B's steps."""


class Replays:
    """Steps `begin` + 1 to `last` of two runs. A context manager, in which nothing deletes the
    checkpoints. Every method raises `ConfigError` if the steps can't be taken here.

    Args:
        code_b: the checkout that B's facts are taken with; None: this one.
        begin: a step of which both have a checkpoint; 0: the initial weights.
    """

    def __init__(
        self, a: RecordedRun, b: RecordedRun, code_b: Path | None, begin: int, last: int
    ) -> None:
        self._a, self._b, self._code_b, self._begin, self._last = a, b, code_b, begin, last
        self._start = a.start_of(last)
        self._exit = ExitStack()
        self._ours: list[Taken] = []
        self._traced = begin + 1

    def __enter__(self) -> "Replays":
        with ExitStack() as stack:
            name = stack.enter_context(TemporaryDirectory(prefix="meshwright-diverge-"))
            self._folder = Path(name)
            if self._begin:
                for run in (self._a, self._b):
                    folder = run.checkpoint_folder(run.start_of(self._last))
                    stack.enter_context(held(listing.step_folder(folder, self._begin)))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def on_own_mesh(
        self, weights: Sequence[Element], later: int | None
    ) -> tuple[Steps, list[Flip]]:
        """Return the steps of A on its mesh, which have the bits of its record; and flipped bits
        that explain the last step of the run that doesn't come back.

        Args:
            weights: that may have been flipped before the last step's forward.
            later: the step of a checkpoint behind it of both.
        """
        runs = self._a, self._b
        folders = [run.checkpoint_folder(run.start_of(self._last)) for run in runs]
        saved = [] if later is None else [str(listing.step_folder(one, later)) for one in folders]
        steps = [*takewhile(self._is_as_last, range(self._last, self._last + 1 + MOST_BEHIND))]
        records = [{step: run.steps[step] for step in steps} for run in runs]
        known = None
        if steps:
            known = Known(records, steps[-1] - self._last, weights, saved)
        interval = Interval(
            self._config(self._a, self._a, self._start["ranks"], {}),
            self._start["ranks"],
            self._last,
            threads=self._start["kernels"]["threads"],
            known=known,
        )
        ((taken,),) = take_all([interval])
        return taken["steps"], taken["flips"]

    def _is_as_last(self, step: int) -> bool:
        """Return whether both runs have a step, taken with the config and the ranks of the last."""
        runs, keys = (self._a, self._b), ("config", "ranks", "stage")
        return all(step in run.steps for run in runs) and all(
            run.start_of(step).get(key) == run.start_of(self._last).get(key)
            for run in runs
            for key in keys
        )

    def on_one_process(self, traced: int, *, is_crossed: bool) -> Findings:
        """Take the steps with the facts of each run, A's also with other microbatches.

        Args:
            traced: the step whose values are compared.
            is_crossed: also take them with the facts of B from the checkpoint of A.
        """
        self._traced = traced
        of_a = Interval(self._config(self._a, self._a), 1, self._last, traced, has_twin=True)
        of_b = [Interval(self._config(self._b, self._b), 1, self._last, traced)]
        if is_crossed and self._begin:  # initial weights follow from the facts of B anyway
            of_b.append(Interval(self._config(self._b, self._a), 1, self._last, traced))
        (self._ours,), ((own,), *others), source_b = self._work([of_a], of_b)
        ours, *twin = (one["steps"] for one in self._ours)
        self._compared = ComparedSteps(
            self._start["config"]["training"]["mixed_precision_param"],
            [ComparedStep(row, None, *(one[step] for one in twin)) for step, row in ours.items()],
        )
        crossed = others[0][0] if others else own
        step, value = self._change(crossed) if is_crossed else (None, None)
        first_other, rounding = self._compared.first_other, self._compared.comparable
        return Findings(
            (first_other(ours, self._a.steps), first_other(own["steps"], self._b.steps)),
            crossed=step,
            rounding=max(chain(*(one.rounding for one in rounding)), default=0.0),
            traced=traced,
            value=value,
            source_b=source_b,
        )

    def is_changed_by(self, keys: Collection[str]) -> bool:
        """Return whether B's values of `keys` change the steps of A, after `on_one_process`. With
        the code of A."""
        if self._a.run.config.get("training", {}).get("stages"):
            raise ConfigError("", "the keys of a run with stages can't be tried one by one")
        values = with_values(self._start["config"], self._b.start_of(self._last)["config"], keys)
        history = [{**self._start, "config": values}]
        hybrid = replace(self._a, run=replace(self._a.run, history=history))
        interval = Interval(self._config(hybrid, self._a), 1, self._last, self._traced)
        ((taken,),) = take_all([interval])
        return any(one is not None for one in self._change(taken))

    def _change(self, taken: Taken) -> tuple[int | None, OtherValue | None]:
        """Return the first step, and value, that other facts than A's have changed."""
        ours, *twin = self._ours
        value = first_other_value(*(one["trace"] for one in (ours, taken, *twin)))
        return self._compared.first_other(taken["steps"], ours["steps"]), value

    def _config(
        self,
        run: RecordedRun,
        checkpoints: RecordedRun,
        ranks: int = 1,
        plain: Update = PLAIN,
    ) -> str:
        """Return the path of a config of the interval, in a folder of its own.

        Args:
            run: has the facts.
            checkpoints: the run to begin from. Initial weights follow from the facts.
        """
        folder = Path(mkdtemp(dir=self._folder))
        given = Namespace(overrides={}, scan=False)
        config = changed(run.config(self._last, self._begin, ranks, given, folder), plain)
        if ranks == 1:
            size = self._start["config"]["training"]["local_batch_size"]
            config = changed(config, {"training": {"local_batch_size": size}})
        if self._begin:
            place = checkpoints.checkpoint_folder(checkpoints.start_of(self._last)).absolute()
            config = changed(config, {"checkpoint": {"folder": str(place)}})
        file = folder / "interval.toml"
        file.write_text(to_toml(config), "utf-8")
        return str(file)

    def _work(
        self, of_a: Sequence[Interval], of_b: Sequence[Interval]
    ) -> tuple[list[Any], list[Any], str]:
        """Return what is taken with the code of each run, and the hash of B's. Different code has a
        process of its own."""
        if self._code_b is None:
            taken = take_all([*of_a, *of_b])
            return taken[: len(of_a)], taken[len(of_a) :], source_hash()
        request, result = self._folder / "request.json", self._folder / "result.pt"
        request.write_text(json.dumps([asdict(one) for one in of_b]), "utf-8")
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(request), str(result)],
            env=os.environ | {"PYTHONPATH": str(self._code_b.absolute())},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            taken = take_all(of_a)
            _, text = process.communicate()
        except BaseException:
            process.kill()  # its result would have no reader, and its files are removed
            process.communicate()
            raise
        if process.returncode:
            lines = text.strip().splitlines() or [f"exit code {process.returncode}"]
            # of a traceback the last line has the error
            line = lines[0 if process.returncode == EXIT_CONFIG else -1]
            raise ConfigError("", f"{self._code_b}: {line}")
        done = torch.load(result, weights_only=True)
        return taken, done["intervals"], done["source"]
