"""Takes an interval of steps again with the facts of two runs, each in a process with its code."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from meshwright.checkpoint import commit
from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.manifest import DamagedError
from meshwright.commands.diverge.trace import OtherValue, first_other_value
from meshwright.commands.diverge.worker import Interval, take_all
from meshwright.commands.replay.recorded import RecordedRun, relative
from meshwright.commands.replay.replay import HORIZON, WITHOUT_TWIN, bounds_of
from meshwright.config.changes import changed
from meshwright.config.job_config import Update
from meshwright.config.loader import to_toml
from meshwright.metrics.report.run import Row
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.modules import source_hash

START = "import sys; from meshwright.commands.diverge.worker import main; main(*sys.argv[1:])"

PLAIN: Update = {"compile": {"enable": False}, "activation_checkpoint": {"mode": "none"}}
"""Modules are watched: compiled ones are no calls, and recomputed ones are called twice."""

Steps = Mapping[int, Row]

Taken = Mapping[str, Any]
"""As `worker` gives it."""


@dataclass(frozen=True)
class Retaken:
    """An interval, taken again on one process."""

    first_off: tuple[int | None, int | None]
    """The first step of A, and of B, that isn't as recorded, by more than rounding."""
    first_crossed: int | None
    """The first step that isn't A's when it is taken from A's checkpoint with the facts of B."""
    rounding: float
    """Largest relative difference of the twin of A."""
    other_value: OtherValue | None
    """The first value of the traced step that isn't A's with the facts of B."""
    source_b: str
    """Hash of the code that has taken B's steps."""


def first_far(steps: Steps, wanted: Steps, bounds: Sequence[float]) -> int | None:
    """Return the first step that differs from `wanted` by more than `bounds` allow its loss, its
    norm and the norms of its groups."""
    for step in sorted(steps.keys() & wanted.keys()):
        apart = relative(metrics_of(steps[step]), metrics_of(wanted[step]))
        if any(distance > bound for distance, bound in zip(apart, bounds, strict=False)):
            return step
    return None


def metrics_of(row: Row) -> list[float | None]:
    """Return the loss, the norm, and the norms of groups of a line."""
    return [row.get("loss"), row.get("grad_norm"), *row.get("norms", [])]


class Replays:
    """Replays of two runs.

    Args:
        code_b: the checkout that B's facts are taken with; None: this one.
    """

    def __init__(self, a: RecordedRun, b: RecordedRun, code_b: Path | None) -> None:
        self._runs, self._code_b = (a, b), code_b

    def on_own_mesh(self, checkpoint: int, last: int) -> Steps:
        """Return the steps of A after `checkpoint` up to `last`, on the mesh of A.

        Raises:
            ConfigError: if they can't be taken here.
        """
        run = self._runs[0]
        start = run.start_of(last)
        with TemporaryDirectory(prefix="meshwright-diverge-") as name, ExitStack() as held:
            self._hold(held, run, checkpoint, last)
            config = self._config(Path(name, "a"), run, checkpoint, last, start["ranks"], {})
            threads = start["kernels"]["threads"]
            interval = Interval(config, start["ranks"], last, threads=threads)
            ((taken,),), _, _ = self._work(Path(name), [interval], [])
        steps: Steps = taken["steps"]
        return steps

    def on_one_process(
        self, checkpoint: int, last: int, traced: int, *, is_crossed: bool
    ) -> Retaken:
        """Return the steps after `checkpoint` up to `last`.

        Args:
            traced: the step whose values are compared.
            is_crossed: the facts of the runs differ.

        Raises:
            ConfigError: if they can't be taken here.
        """
        a, b = self._runs
        folder = a.checkpoint_folder(a.start_of(last))
        with TemporaryDirectory(prefix="meshwright-diverge-") as name, ExitStack() as held:
            for run in self._runs:
                self._hold(held, run, checkpoint, last)
            size = a.start_of(last)["config"]["training"]["local_batch_size"]
            same: Update = {"training": {"local_batch_size": size}}
            config = self._config(Path(name, "a"), a, checkpoint, last, 1, {})
            of_a = Interval(config, 1, last, traced, has_twin=True)
            config = self._config(Path(name, "b"), b, checkpoint, last, 1, same)
            of_b = [Interval(config, 1, last)]
            if is_crossed:
                # initial weights are of B's own code and config
                at = {"checkpoint": {"folder": str(folder.absolute())}} if checkpoint else {}
                from_a = {**same, **at}
                config = self._config(Path(name, "crossed"), b, checkpoint, last, 1, from_a)
                of_b.append(Interval(config, 1, last, traced))
            ((ours, *twin),), theirs, sources = self._work(Path(name), [of_a], of_b)
        ((own,), *crossed) = theirs
        return self._judge(ours, twin, own, [one[0] for one in crossed], sources[1])

    def _judge(
        self,
        ours: Taken,
        twin: Sequence[Taken],
        own: Taken,
        crossed: Sequence[Taken],
        source_b: str,
    ) -> Retaken:
        """Return the findings of what was taken; there may be no twin, and nothing crossed."""
        steps: Steps = ours["steps"]
        rounding = {
            step: relative(metrics_of(row), metrics_of(steps[step]))
            for one in twin
            for step, row in one["steps"].items()
        }
        # where rounding has grown too much, nothing can be told
        known = {s: row for s, row in steps.items() if rounding.get(s, [0.0])[0] <= HORIZON}
        training = self._runs[0].start_of(max(steps))["config"]["training"]
        without = [WITHOUT_TWIN[training["mixed_precision_param"]]] * len(
            metrics_of(steps[max(steps)])
        )
        bounds = bounds_of([rounding[step] for step in known if step in rounding]) or without
        value = None
        if crossed:
            value = first_other_value(*(one["trace"] for one in (ours, *crossed, *twin)))
        of_b = {step: own["steps"][step] for step in known}
        off = [
            first_far(taken, run.steps, bounds)
            for taken, run in zip((known, of_b), self._runs, strict=True)
        ]
        return Retaken(
            first_off=(off[0], off[1]),
            first_crossed=first_far(crossed[0]["steps"], known, bounds) if crossed else None,
            rounding=max((max(rounding[step]) for step in known if step in rounding), default=0.0),
            other_value=value,
            source_b=source_b,
        )

    def _hold(self, held: ExitStack, run: RecordedRun, checkpoint: int, last: int) -> None:
        """Keep a job that runs from deleting the checkpoint."""
        if checkpoint:
            path = commit.step_folder(run.checkpoint_folder(run.start_of(last)), checkpoint)
            try:
                held.enter_context(being_read(path))
            except DamagedError as error:
                fix = "run the same command again: it takes a different one"
                raise ConfigError("", f"{path}: {error.what}\n  fix: {fix}") from None

    def _config(
        self,
        folder: Path,
        run: RecordedRun,
        checkpoint: int,
        last: int,
        ranks: int,
        update: Mapping[str, Any],
    ) -> str:
        """Return the path of the config of an interval, in a folder of its own."""
        folder.mkdir()
        given = Namespace(overrides={}, scan=False)
        plain = {} if ranks > 1 else PLAIN
        config = changed(run.config(last, checkpoint, ranks, given, folder), {**plain, **update})
        file = folder / "interval.toml"
        file.write_text(to_toml(config), "utf-8")
        return str(file)

    def _work(
        self, folder: Path, of_a: Sequence[Interval], of_b: Sequence[Interval]
    ) -> tuple[list[Any], list[Any], list[str]]:
        """Return what is taken with the code of each run, and the hashes of both codes. Different
        code has a process of its own."""
        if self._code_b is None:
            taken = take_all([*of_a, *of_b])
            return taken[: len(of_a)], taken[len(of_a) :], [source_hash()] * 2
        request, result = folder / "request.json", folder / "result.pt"
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
        return taken, done["intervals"], [source_hash(), done["source"]]
