"""Signals to whole jobs: what is saved, the exit code, the words, and whether a process is left.

A cell is a signal, who gets it, the phase of the job and its console. The job is a tiny model that
`meshwright train` starts; a module of the job's own (`experimental.custom_import`, this file) makes
the phase last for some seconds, so that the signal falls into it.

    python -m tests.campaigns.signals                                     every cell: an hour or two
    python -m tests.campaigns.signals --signals INT HUP --phases step     some of them
    python -m tests.campaigns.signals --cells 40 --seed 3                 so many, drawn at random
    python -m tests.campaigns.signals --save-s 40 --phases save           a save longer than 30 s

It prints a line per cell. It ends with 1 if a cell breaks the rules of docs/checkpoints.md: a
request saves the step and ends with 75, or ends the job at once where there is nothing new to save.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = ("HUP", "INT", "TERM", "USR1", "QUIT")
TARGETS = ("launcher", "rank", "group")
PHASES = ("setup", "step", "save", "validation", "export")
CONSOLES = ("terminal", "nohup", "pipe")
STALLED, STALL_S, FILE = "SIGNALS_PHASE", "SIGNALS_STALL_S", "SIGNALS_FILE"
"""Environment variables of the job: the phase to make long, by how much, a file to make in it."""
SETUP_STALL_S, EXPORT_STALL_S = 20.0, 20.0
"""Longer than a request may take to be heard."""
HEARD_WITHIN_S = 15.0
JOB = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, hidden_dim = 64}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "compile.enable": "false",
    "checkpoint.enable": "true",
    "checkpoint.interval": 1000000,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "validation.enable": "false",
    "experimental.custom_import": __file__,
}
PHASE_KEYS: dict[str, dict[str, object]] = {
    "setup": {"training.steps": 1000000},
    "step": {"training.steps": 1000000},
    "save": {"training.steps": 1000000, "checkpoint.interval": 5},
    "validation": {
        "training.steps": 1000000,
        "validation.enable": "true",
        "validation.freq": 5,
        "validation.num_samples": 400,
    },
    "export": {"training.steps": 6, "checkpoint.last_save_in_hf": "true"},
}


# --- in the job -------------------------------------------------------------------------------


def _stall(seconds: float) -> None:
    """Say that the phase has begun, and make it last."""
    Path(os.environ[FILE]).touch()
    time.sleep(seconds)


def _slow_sink(config: object, folder: Path) -> Any:
    """A sink of the job's own, which takes long to open: a part of set-up."""
    _stall(SETUP_STALL_S)
    raise OSError("the sink of tests/campaigns/signals.py is opened in vain")


def _slow_down(phase: str, seconds: float) -> None:
    """Wrap the function of the job in which the phase happens."""
    from meshwright.checkpoint import manager
    from meshwright.train import end, validation

    def before(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: object, **given: object) -> Any:
            _stall(seconds)
            return function(*args, **given)

        return slow

    if phase == "save":
        manager.CheckpointManager.save = before(manager.CheckpointManager.save, seconds)  # type: ignore[method-assign]
    elif phase == "export":
        end.export_last = before(end.export_last, EXPORT_STALL_S)
    elif phase == "validation":
        validate = validation.Validation.__call__

        def slowly(self: Any, model: Any, stopped: Callable[..., Any], *others: Any) -> Any:
            return validate(self, model, before(stopped, 0.3), *others)

        validation.Validation.__call__ = slowly  # type: ignore[method-assign]


SINKS = {"slow": _slow_sink} if os.environ.get(STALLED) == "setup" else {}
if os.environ.get(STALLED) and "RANK" in os.environ:
    _slow_down(os.environ[STALLED], float(os.environ[STALL_S]))


# --- the campaign -----------------------------------------------------------------------------


class Cell(NamedTuple):
    """Where a signal goes."""

    signal: str
    target: str
    phase: str
    console: str


@dataclass
class Result:
    """What became of a job."""

    code: int
    seconds: float
    """From the signal to the launcher's end."""
    trained: int
    """The last step on record."""
    saved: int
    """The newest checkpoint's step; 0: none."""
    words: str
    left: int
    """Processes of the job that outlived the launcher by some seconds."""

    def __str__(self) -> str:
        left = f", {self.left} PROCESSES LEFT" if self.left else ""
        return (
            f"{self.code:3} in {self.seconds:4.1f} s, trained {self.trained}, saved {self.saved}"
            f"{left}: {self.words}"
        )


class Job:
    """A job on one console, in a process group of its own."""

    def __init__(self, cell: Cell, folder: Path, root: Path, ranks: int, save_s: float) -> None:
        self.cell, self.folder = cell, folder / "out"
        self.in_phase, self._console = folder / "in_phase", folder / "console.log"
        keys = JOB | PHASE_KEYS[cell.phase] | {"job.dump_folder": self.folder}
        words = [sys.executable, "-P", "-m", "meshwright.commands.main", "train"]
        words += [f"--{key}={value}" for key, value in keys.items()]
        env = os.environ | {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        env |= {"CUDA_VISIBLE_DEVICES": "", "MESHWRIGHT_COLUMNS": "10000"}
        env |= {STALLED: cell.phase, STALL_S: str(save_s), FILE: str(self.in_phase)}
        self._tee: subprocess.Popen[bytes] | None = None
        self._terminal, self._is_closed = -1, False
        self.process = {"terminal": self._on_terminal, "pipe": self._into_tee}.get(
            cell.console, self._under_nohup
        )(words, env)

    def _on_terminal(self, words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        self._terminal, inside = pty.openpty()

        def take_terminal() -> None:
            _default_signals()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            words,
            env=env,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(inside)
        threading.Thread(target=self._keep_what_is_shown, daemon=True).start()
        return process

    def _keep_what_is_shown(self) -> None:
        with self._console.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while not self._is_closed:
                # a read that waits would keep the terminal open
                if select.select([self._terminal], [], [], 0.05)[0]:
                    file.write(os.read(self._terminal, 4096))
        if self._is_closed:
            os.close(self._terminal)  # the kernel sends SIGHUP

    def _into_tee(self, words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        read_end, write_end = os.pipe()
        process = self._start(words, env, write_end)
        self._tee = subprocess.Popen(
            ["tee", self._console],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            process_group=process.pid,
            preexec_fn=_default_signals,
        )
        os.close(read_end)
        os.close(write_end)
        return process

    def _under_nohup(self, words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._console.open("wb") as file:
            return self._start(["nohup", *words], env, file)

    def _start(
        self, words: list[str], env: dict[str, str], console: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            process_group=0,
            preexec_fn=_default_signals,
        )

    def processes(self) -> list[int]:
        """Ranks first, then whatever else has the job's folder in its command line."""
        ranks, others = [], []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if os.fsencode(self.folder) in words and b"meshwright" in words:
                    is_rank = b"meshwright.train\0" in words and b"meshwright.launch\0" not in words
                    (ranks if is_rank else others).append(int(path.parent.name))
        return sorted(ranks) + [pid for pid in others if pid != self.process.pid]

    def wait_for_phase(self) -> None:
        """Return when the job is in the cell's phase."""
        end = time.monotonic() + 240
        while not (self.trained() if self.cell.phase == "step" else self.in_phase.exists()):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the job did not come to {self.cell.phase}:\n{self.console()}")
            time.sleep(0.02)
        time.sleep(0.3)

    def send(self) -> None:
        """Send the signal as its sender would."""
        number = getattr(signal, f"SIG{self.cell.signal}")
        if self.cell.target == "rank":
            os.kill(self.processes()[-1], number)
        elif self.cell.target == "launcher":
            os.kill(self.process.pid, number)
        elif self.cell.console == "terminal" and self.cell.signal == "INT":
            os.write(self._terminal, b"\x03")
        elif self.cell.console == "terminal" and self.cell.signal == "QUIT":
            os.write(self._terminal, b"\x1c")
        elif self.cell.console == "terminal" and self.cell.signal == "HUP":
            self._is_closed = True  # the window is closed, or ssh ends
        else:
            os.killpg(self.process.pid, number)

    def trained(self) -> int:
        """Return the last step on record."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def saved(self) -> int:
        """Return the step of the newest checkpoint."""
        found = (self.folder / "checkpoint").glob("step-*/checkpoint.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def console(self) -> str:
        """Return all that was shown, without colours."""
        text = self._console.read_text(errors="replace") if self._console.exists() else ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)

    def words(self) -> str:
        """Return what the console, or the first rank's log, says of the end."""
        log = self.folder / "logs" / "rank_0.log"
        text = self.console() + (log.read_text() if log.exists() else "")
        said = [
            re.sub(r"^\S*\d\d:\d\d:\d\d ", "", line.removeprefix("meshwright: "))
            for line in text.splitlines()
            if re.search(r"SIG|stopped|failed|killed|death|Traceback|left out|saved nothing", line)
            and "has been in" not in line
        ]
        return " | ".join(dict.fromkeys(re.sub(r"^[\d-]+ [\d:]+ ", "", line) for line in said))

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in [*self.processes(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._tee is not None:
            self._tee.wait()


def _default_signals() -> None:
    """Let a shell that has started this script in the background be forgotten."""
    for name in SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)


def run(cell: Cell, root: Path, ranks: int, save_s: float) -> Result:
    """Start a job, send the signal, and see what becomes of it."""
    with tempfile.TemporaryDirectory(prefix="signals_") as folder:
        job = Job(cell, Path(folder), root, ranks, save_s)
        try:
            job.wait_for_phase()
            job.send()
            sent = time.monotonic()
            is_ignored = cell.signal == "HUP" and cell.console == "nohup"
            limit_s = 4.0 if is_ignored else 60.0 + save_s
            try:
                code = job.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                words = "it trains on" if is_ignored else f"NOT OVER; {job.words()}"
                return Result(-1, limit_s, job.trained(), job.saved(), words, 0)
            seconds = time.monotonic() - sent
            end = time.monotonic() + 5
            while (left := job.processes()) and time.monotonic() < end:
                time.sleep(0.1)
            code = 128 - code if code < 0 else code
            return Result(code, seconds, job.trained(), job.saved(), job.words(), len(left))
        finally:
            job.end()


def fault(cell: Cell, result: Result) -> str:
    """Return which promise the result breaks; "" if none."""
    if result.left:
        return "processes are left"
    if cell.signal == "HUP" and cell.console == "nohup":
        return "" if result.code == -1 else "nohup has no effect"
    if cell.signal == "QUIT":
        return "" if result.code == 128 + signal.SIGQUIT else "QUIT is not at once"
    if cell.phase == "setup":
        by_torchrun = cell.target == "rank" and cell.signal == "TERM"
        want = 130 if cell.signal == "INT" else 143 if by_torchrun else 75
        if result.seconds > HEARD_WITHIN_S:
            return "set-up is waited for"
        return "" if result.code == want and not result.saved else f"not {want}"
    if cell.phase == "export" and cell.target == "rank" and cell.signal == "TERM":
        return "" if result.code in (75, 143) and result.saved == 6 else "not 75 or 143"
    if result.code != 75:
        return "not 75"
    if cell.phase == "export":
        is_heard = result.seconds < HEARD_WITHIN_S
        return "" if result.saved == 6 and is_heard else "the export is waited for"
    return "" if result.saved == result.trained > 0 else "a step is lost"


def _cells(given: argparse.Namespace) -> Iterator[Cell]:
    parts = given.signals, given.targets, given.phases, given.consoles
    every = [Cell(*words) for words in itertools.product(*parts)]
    yield from random.Random(given.seed).sample(every, given.cells) if given.cells else every


def main() -> None:
    """Run the cells, and judge them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signals", nargs="*", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=TARGETS)
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=PHASES)
    parser.add_argument("--consoles", nargs="*", choices=CONSOLES, default=CONSOLES)
    parser.add_argument("--cells", type=int, default=0, help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save-s", type=float, default=3.0, help="seconds that a save takes")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to try")
    given = parser.parse_args()
    num_wrong = 0
    for cell in _cells(given):
        try:
            result = run(cell, given.root, given.ranks, given.save_s)
            wrong = fault(cell, result)
        except RuntimeError as error:
            result, wrong = None, str(error)
        num_wrong += bool(wrong)
        verdict = f"WRONG ({wrong})" if wrong else "right"
        print(f"{' '.join(cell):32} {verdict:12} {result}", flush=True)
    print(f"{num_wrong} wrong")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
