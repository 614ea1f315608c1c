"""A worker: takes the runs of an experiment, one at a time, until every arm is decided.

Any number of them share an experiment, on all nodes that see its folder. The worker of a run has
its lease; the run ends with its worker, and the next one that takes the lease resumes it.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from meshwright.checkpoint.lease import FILE as JOB_LEASE
from meshwright.checkpoint.listing import saved_steps, step_folder
from meshwright.commands.experiment.registry import Arm, Experiment, config_of, lease, save
from meshwright.commands.experiment.results import (
    VALIDATIONS,
    Key,
    Result,
    folder_of,
    has_ended,
    judged,
    write_result,
)
from meshwright.commands.experiment.spec import BASE, Document, Values, as_word
from meshwright.commands.experiment.state import State
from meshwright.metrics.report.run import read_run
from meshwright.system.errors import (
    EXIT_CONFIG,
    EXIT_STOPPED,
    EXIT_TRAINING,
    StopRequested,
    check,
)
from meshwright.system.lease import Lease, is_gone, owner_of
from meshwright.system.processes import stop_signals

POLL_S = 1.0
"""Between two looks for a run to take, while others have all."""

ATTEMPTS = 2
"""Crashes of a run in a row, after which it has failed."""

CALIBRATION_PART = 0.1
"""Of the seconds of the budget, which the base trains to measure the time of a step."""
LEAST_CALIBRATION_S = 5

CHECKPOINTS = "checkpoint"
"""Folder of the checkpoints in each dump folder."""

KEPT = ("checkpoint.interval", "checkpoint.keep_every_n_steps")
"""Keys that decide which checkpoints there are when a run is over."""

MOST_CHECKPOINTS = 50
"""That a run saves and keeps for branches without being asked to."""

CHILD = """
import sys
from meshwright.commands.main import main
from meshwright.system.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
main()
"""
"""A `meshwright train` that the kernel kills with its worker."""

Note = Callable[[str], None]


class Worker:
    """Takes the runs that a `state` wants; `note` gets a line for each."""

    def __init__(self, document: Document, note: Note, kind: type[State]) -> None:
        self._document, self._spec, self._note = document, document.spec, note
        self._kind = kind
        self._leases = dict[str, Lease]()
        self._since_s = time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = list[str]()

    def work(self) -> State:
        """Take runs until none is wanted; return how things are then.

        Raises:
            StopRequested: if a signal asked for it; the run is saved, and the next worker has it.
        """
        before = {number: signal.signal(number, self._stop) for number in stop_signals()}
        try:
            self._measure_budget()
            while [*(state := self._state()).wanted(self._since_s)]:
                if not self._take_one(state):
                    time.sleep(POLL_S)
                self._check_asked()
            return state
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _state(self) -> State:
        return self._kind.of(self._document)

    def _take_one(self, state: State) -> bool:
        """Take the first wanted run that nobody else has, to its end; return whether there was
        one."""
        for key in state.wanted(self._since_s):
            name = f"{key.arm}.seed-{key.seed}"
            own = self._leases.setdefault(name, lease(self._document, name))
            if not own.take():
                continue
            try:
                # its last worker may have finished it since the results were read
                state = self._state()
                if key in {*state.wanted(self._since_s)}:
                    self._finish(state, key)
            finally:
                own.give_back()
            return True
        return False

    def _finish(self, state: State, key: Key) -> None:
        """Train a run to its end, and write its result."""
        folder, since_s, code = folder_of(self._document, key), time.time(), 0
        if line := state.forecast(key):
            self._note(line)
        arm, steps = state.experiment.arms[key.arm], state.steps_of(key)
        for attempt in range(1, ATTEMPTS + 1):
            if not has_ended(folder, steps):
                code = self._train_to(state.experiment, arm, key, steps)
                self._check_asked()
            if code in (0, EXIT_TRAINING):
                break
            self._note(f"{key.arm}, seed {key.seed}: exit code {code} ({attempt}): {folder}")
            owner = owner_of(folder / CHECKPOINTS / JOB_LEASE)
            if code == EXIT_CONFIG and owner is not None and not is_gone(owner):
                # the job of a worker that is gone has the folder, and is about to end
                time.sleep(POLL_S)
                return
        fields = judged(folder, state.experiment.metric, steps) if code == 0 else {}
        fields = {"status": "diverged" if code == EXIT_TRAINING else "failed"} | fields
        ended_s = time.time()
        seconds = round(ended_s - since_s, 3)
        fields |= {"exit_code": code, "steps": steps, "seconds": seconds, "ended_s": ended_s}
        result = Result(*key, **fields)
        write_result(self._document, state.experiment, result)
        end = result.status if result.value is None else f"{result.value:.4f}"
        self._note(f"{key.arm}, seed {key.seed}: {end} in {seconds:.0f} s")

    def _train_to(self, experiment: Experiment, arm: Arm, key: Key, steps: int) -> int:
        """Train a run to a step, from where it is, as the runs of an arm are trained; return the
        exit code."""
        if not branch_off(self._document, arm, key):
            # the run that it branches off from hasn't kept that step
            start = experiment.arms[arm.on]
            if code := self._train_to(experiment, start, key, arm.branch):
                return code
        all_steps, common = experiment.steps_of(arm), self._spec.common
        frequency = max(steps // VALIDATIONS, 1)
        defaults = {"checkpoint.keep_latest_k": 1, "validation.freq": frequency}
        settings = {"training.seed": key.seed, "training.steps": steps}
        settings |= {name: value for name, value in defaults.items() if name not in common}
        settings |= settings_of_origin(experiment, arm, common)
        if steps < all_steps:
            file = self._document.file.parent / arm.config
            settings |= settings_of_part(str(file), arm.keys, all_steps)
        return self._train(arm, folder_of(self._document, key), settings)

    def _train(self, arm: Arm, folder: Path, settings: Values) -> int:
        """Run `meshwright train` in a dump folder; return its exit code."""
        folder.mkdir(parents=True, exist_ok=True)
        keys = arm.keys | settings | {"job.dump_folder": str(folder)}
        keys |= {"checkpoint.enable": True, "checkpoint.folder": CHECKPOINTS}
        words = ["train", arm.config, "--ngpu", str(arm.ranks), "--nnodes", "1"]
        words += [f"--{key}={as_word(value)}" for key, value in keys.items()]
        with open(folder / "console.log", "ab") as console:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, str(os.getpid()), *words],
                cwd=self._document.file.parent,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the worker, which passes it on
            )
        if self._requests:
            self._child.terminate()
        return self._child.wait()

    def _measure_budget(self) -> None:
        """Turn a budget in seconds into steps: once, by the base on this machine, so that the runs
        of a pair have as many."""
        seconds = self._spec.budget.seconds
        if seconds is None:
            return
        with lease(self._document, "budget"):
            self._check_asked()
            experiment = self._state().experiment
            if experiment.seconds_to_steps:
                return
            folder = self._document.folder / "budget"
            shutil.rmtree(folder, ignore_errors=True)
            limit = max(round(CALIBRATION_PART * seconds), LEAST_CALIBRATION_S)
            endless = {"training.steps": 2**31, "lr_scheduler.total_steps": 2**31}
            settings = endless | {"job.max_run_seconds": limit}
            settings |= {"metrics.log_freq": 1, "validation.enable": False}
            code = self._train(experiment.arms[BASE], folder, settings)
            self._check_asked()
            times = read_run(folder).values("time/step_s") if code == EXIT_STOPPED else []
            fix = f"see {folder}/console.log"
            check(len(times) > 1, "budget.seconds", seconds, "the base can't be timed", fix)
            step_s = median(times[1:])
            fitting = round(seconds / step_s)
            steps = max(fitting, VALIDATIONS)
            with lease(self._document, "arms"):
                current = self._state().experiment
                save(self._document, replace(current, seconds_to_steps=steps))
            shutil.rmtree(folder, ignore_errors=True)
            more = f"; runs take {steps}, one for each of their validations"
            text = f"{seconds} s are {fitting} steps of {step_s:.3g} s on this machine"
            self._note(text + (more if steps > fitting else ""))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on to the run; the second one ends it at once."""
        self._requests.append(signal.Signals(number).name)
        if self._child is not None and self._child.poll() is None:
            (self._child.terminate if len(self._requests) == 1 else self._child.kill)()

    def _check_asked(self) -> None:
        if self._requests:
            raise StopRequested(self._requests[0])


def settings_of_part(file: str, keys: Values, steps: int) -> Values:
    """Return further keys of a run that ends early: it is resumed later, and its schedule is that
    of all `steps` of the budget, unless the arm has its own."""
    settings: Values = {"checkpoint.last_save_model_only": False}
    if config_of(file, keys).lr_scheduler.total_steps is None:
        settings["lr_scheduler.total_steps"] = steps
    return settings


def settings_of_origin(experiment: Experiment, arm: Arm, common: Mapping[str, Any]) -> Values:
    """Return the keys by which the runs of an arm keep what its branches start from, unless that is
    too much."""
    branches = [one.branch for one in experiment.arms.values() if one.branch and one.on == arm.name]
    every = math.gcd(*branches)
    is_little = every > 0 and experiment.steps_of(arm) // every <= MOST_CHECKPOINTS
    return {key: every for key in KEPT if is_little and key not in common}


def branch_off(document: Document, arm: Arm, key: Key) -> bool:
    """Give a run the checkpoint from which the runs of an arm start, by hard links, unless it's
    beyond; return whether it has one now: the run of that arm's reference may not have kept it."""
    folder = folder_of(document, key) / CHECKPOINTS
    if max(saved_steps(folder), default=0) >= arm.branch:
        return True
    reference = folder_of(document, Key(arm.on, key.seed))
    origin = step_folder(reference / CHECKPOINTS, arm.branch)
    if not origin.is_dir():
        return False
    # renamed when it is complete, as the worker may be killed here
    partial = folder / f".{origin.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(origin, partial, copy_function=_link)
    partial.rename(folder / origin.name)
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of a file system without hard links
        shutil.copy2(source, target)
