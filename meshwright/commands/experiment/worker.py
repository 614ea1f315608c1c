"""A worker: takes the runs of an experiment, one at a time, until every arm is decided.

Any number of them share an experiment, on all nodes that see its folder. The worker of a run has
its lease; the run ends with its worker, and the next one that takes the lease resumes it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Generic, TypeVar

from meshwright.checkpoint.lease import FILE as JOB_LEASE
from meshwright.commands.experiment.branches import (
    CHECKPOINTS,
    branch_off,
    settings_of_origin,
)
from meshwright.commands.experiment.registry import Arm, config_of, lease, load, save
from meshwright.commands.experiment.results import (
    VALIDATIONS,
    Key,
    Result,
    folder_of,
    has_ended,
    judged,
    read_results,
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

CHILD = """
import sys
from meshwright.commands.main import main
from meshwright.system.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
main()
"""
"""A `meshwright train` that the kernel kills with its worker."""

Note = Callable[[str], None]
AnyState = TypeVar("AnyState", bound=State)


class Worker(Generic[AnyState]):
    """Takes the runs that a `state` wants; `note` gets a line for each."""

    def __init__(self, document: Document, note: Note, state: Callable[..., AnyState]) -> None:
        self._document, self._spec, self._note = document, document.spec, note
        self._make_state = state
        self._leases = dict[str, Lease]()
        self._since_s = time.time()
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = list[str]()

    def work(self) -> AnyState:
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

    def _state(self) -> AnyState:
        experiment = load(self._document)
        assert experiment is not None
        results = read_results(self._document, experiment)
        return self._make_state(self._document, experiment, results)

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
        experiment, folder = state.experiment, folder_of(self._document, key)
        arm, steps = experiment.arms[key.arm], state.steps_of(key)
        since_s, code = time.time(), 0
        if line := state.forecast(key):
            self._note(line)
        own = self._settings(steps) | settings_of_origin(experiment, arm, self._spec.common)
        settings = {"training.seed": key.seed, **own}
        if steps < experiment.steps_of(arm):
            settings |= _settings_of_screening(arm, experiment.steps_of(arm))
        for attempt in range(1, ATTEMPTS + 1):
            if not has_ended(folder, steps):
                branch_off(self._document, arm, key.seed)
                code = self._train(arm, folder, settings)
                self._check_asked()
            if code in (0, EXIT_TRAINING):
                break
            self._note(f"{key.arm}, seed {key.seed}: exit code {code} ({attempt}): {folder}")
            owner = owner_of(folder / CHECKPOINTS / JOB_LEASE)
            if code == EXIT_CONFIG and owner is not None and not is_gone(owner):
                # the job of a worker that is gone has the folder, and is about to end
                time.sleep(POLL_S)
                return
        fields = judged(folder, experiment.metric, steps) if code == 0 else {}
        fields = {"status": "diverged" if code == EXIT_TRAINING else "failed"} | fields
        ended_s = time.time()
        seconds = round(ended_s - since_s, 3)
        result = Result(
            arm=key.arm,
            seed=key.seed,
            exit_code=code,
            steps=steps,
            seconds=seconds,
            ended_s=ended_s,
            **fields,
        )
        write_result(self._document, experiment, result)
        end = result.status if result.value is None else f"{result.value:.4f}"
        self._note(f"{key.arm}, seed {key.seed}: {end} in {seconds:.0f} s")

    def _settings(self, steps: int) -> Values:
        """Return the keys that the experiment sets for a run of so many steps."""
        defaults = {"checkpoint.keep_latest_k": 1, "validation.freq": max(steps // VALIDATIONS, 1)}
        own = {key: value for key, value in defaults.items() if key not in self._spec.common}
        return {"training.steps": steps, **own}

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
        if seconds is None or self._state().experiment.seconds_to_steps:
            return
        with lease(self._document, "budget"):
            self._check_asked()
            experiment = self._state().experiment
            if experiment.seconds_to_steps:  # a different worker was first
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
            text = f"{seconds} s are {fitting} steps of {step_s:.3g} s on this machine"
            if steps > fitting:
                text += f"; runs take {steps}, one for each of their validations"
            self._note(text)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on to the run; the second one ends it at once."""
        self._requests.append(signal.Signals(number).name)
        if self._child is not None and self._child.poll() is None:
            (self._child.terminate if len(self._requests) == 1 else self._child.kill)()

    def _check_asked(self) -> None:
        if self._requests:
            raise StopRequested(self._requests[0])


def _settings_of_screening(arm: Arm, steps: int) -> Values:
    """Return further keys of a run that ends early: the next round resumes it, and its schedule is
    that of all `steps` of the budget, unless the arm has its own."""
    key = "lr_scheduler.total_steps"
    has_own = key in arm.keys or config_of(arm.config, {}).lr_scheduler.total_steps is not None
    resumable = {"checkpoint.last_save_model_only": False}
    return resumable if has_own else resumable | {key: steps}
