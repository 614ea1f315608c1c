"""Signals of a job's processes, facts that the launcher tells its ranks, and workers. No torch."""

import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meshwright.system.errors import EXIT_INTERRUPTED, StopRequested, code_of_request
from meshwright.system.files import text_of

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

Result = TypeVar("Result")

STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""A terminal that closes; signals that Slurm and others send some time before they kill; Ctrl-C."""

LAUNCH = "MESHWRIGHT_LAUNCH"
"""Environment variable of the ranks: a `Launch`, as JSON."""

STOP, TRAINED = "stop", "trained"
"""Files in the launcher's folder. It writes the name of the signal that it was sent to the first,
and doesn't pass the signal on: torchrun sends SIGTERM to the ranks of a job that has failed, and a
rank couldn't tell which it is. A rank makes the second once it has taken a step."""


@dataclass(frozen=True)
class Launch:
    """What our launcher tells the ranks. Each process reads it once, at its start."""

    pid: int = 0
    """The launcher's process; 0: the ranks were started by another, such as plain torchrun."""
    folder: str = ""
    """On this machine: for requests to stop, and for heartbeats."""
    terminal: str = ""
    """The local rank that is shown and the launcher's terminal, as "0:/dev/pts/3". torchrun hands
    the output of ranks on line by line, without color or bars."""
    is_checked: bool = False
    """`meshwright check` has written to the same console."""
    checked_step: int = -1
    """Step of the checkpoint that it has told of; 0: it has seen none; -1: it hasn't looked."""
    num_gpus: int = 0
    """GPUs of this machine, as the launcher counted them."""
    host_settings: str = ""
    """Environment variables that the launcher has chosen for the machine."""

    @classmethod
    def of_environment(cls) -> "Launch":
        """Return what the launcher has told; without one, the defaults."""
        return cls(**json.loads(os.environ.get(LAUNCH, "{}")))

    def as_variable(self) -> dict[str, str]:
        """Return the environment variable from which `of_environment` reads this."""
        return {LAUNCH: json.dumps(asdict(self))}


WAITING = {"GOMP_SPINCOUNT": "10000"}
"""How often a thread of a CPU's operator looks whether the others are ready, before it sleeps.
GNU's OpenMP reads it once, when torch is imported, and does it thirty times as often: whatever else
wants the core then waits."""

OTHER_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

OTHER_MALLOC = ("LD_PRELOAD", "GLIBC_TUNABLES")
"""Environment variables by which users choose an allocator of memory on CPUs, or settings of
glibc's. The launcher and the ranks then choose none."""

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

NUDGE = signal.SIGURG
"""Brings the main thread of a rank back to Python, even from a sleep. Its default is no effect."""

LISTEN_EVERY_S = 0.5
"""Seconds between two looks for the launcher's request."""

STUCK_S = 5.0
"""Seconds after which a rank that has nothing to save ends, though its main thread hasn't come
back from C."""

JOIN_TIMEOUT_S = 20
"""Seconds a rank that got SIGTERM waits for the others to join the stop. If they don't, the job
has failed: exit before torchrun's SIGKILL at 30 s hides the cause."""


def waiting(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return `WAITING`, unless the environment has something else to say about it."""
    return {} if any(name in inherited for name in OTHER_WAITING) else WAITING


@contextmanager
def short_waiting() -> Iterator[None]:
    """Give `waiting` to a torch that is imported inside; the environment is left as it was."""
    added = waiting(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to stop: not the ones that were ignored when it
    started, as SIGHUP is under nohup, and Ctrl-C in the background of a script."""
    return [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]


def exit_when_asked() -> None:
    """End this process at once when it is asked to stop: there is nothing to save yet."""
    for number in stop_signals():
        signal.signal(number, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # held while `train` becomes torchrun


def _exit(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    with suppress(OSError):  # nobody reads it any more
        os.write(2, f"meshwright: {before_training(name)}\n".encode())
    os._exit(code_of_request(name))


def before_training(name: str) -> str:
    """Return the last words of a job that is asked to stop before its first step."""
    return f"{name}: stopped before the first step of this start; there is nothing new to save"


class Requests:
    """Requests to stop that this rank gets: its own signals, and the launcher's file.

    As a context, in the main thread: another thread listens, whatever the main thread does. By
    `when_asked` a request ends the process ("exit"), raises `StopRequested` in the main thread
    ("raise"), or is only noted ("hold"). A second Ctrl-C ends the process at once.

    Attributes:
        name: the signal of the first request; "": none has come.
        has_trained: this process has taken a step.
        is_agreed: all ranks know of a request.

    Args:
        folder: of the launcher, on this machine; "": the ranks have none.
    """

    def __init__(self, when_asked: Literal["exit", "raise"] = "raise", folder: str = "") -> None:
        self.when_asked: Literal["exit", "raise", "hold"] = when_asked
        self.name, self.has_trained, self.is_agreed = "", False, False
        self._folder = Path(folder) if folder else None
        self._num_interrupts = 0
        self._is_entered = self._is_raised = False

    def __enter__(self) -> "Requests":
        # Python writes a signal's number only if it has a handler for it
        self._before = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
        self._before[NUDGE] = signal.signal(NUDGE, self._raise)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Python's handlers wait until the main thread is back in Python, from a compiler, say; the
        # number is written here at once, and read by a thread
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._is_entered = True
        # a process that a library forks must not write its own signals into our pipe
        os.register_at_fork(
            before=partial(self._mask, signal.SIG_BLOCK),
            after_in_parent=partial(self._mask, signal.SIG_UNBLOCK),
            after_in_child=self._forget,
        )
        threading.Thread(target=self._listen, name="requests", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._is_entered = False
        os.close(self._write_end)  # ends the thread

    @property
    def is_of_failure(self) -> bool:
        """Whether the request may be torchrun's signal, which ends the ranks of a failed job."""
        return self.name == signal.SIGTERM.name and self._may_be_torchrun_s()

    def _may_be_torchrun_s(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and not self._launcher_says()

    def look(self) -> str:
        """Return the name of the request, if there is one by now; "": none."""
        return self.name or self._launcher_says()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only note requests inside: there is something to save."""
        before, self.when_asked = self.when_asked, "hold"
        try:
            yield
        finally:
            self.when_asked = before

    def check(self) -> None:
        """Raise `StopRequested` if a request has come: it may have been only noted."""
        if self.name:
            self._is_raised = True
            raise StopRequested(self.name)

    def note_training(self) -> None:
        """Note, for the launcher too, that there is something to save from now on."""
        self.has_trained = True
        if self._folder is not None:
            with suppress(OSError):  # a full disk: the launcher's words are then less exact
                (self._folder / TRAINED).touch()

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _mask(self, how: int) -> None:
        if self._is_entered:
            signal.pthread_sigmask(how, STOP_SIGNALS)

    def _forget(self) -> None:
        """Have a process that was forked from this one end by signals as usual."""
        if self._is_entered:
            self._restore()
            self._mask(signal.SIG_UNBLOCK)
            self._is_entered = False

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._read_end], [], [], LISTEN_EVERY_S)
            byte = os.read(self._read_end, 1) if ready else b""
            if ready and not byte:
                break
            if byte and byte[0] in STOP_SIGNALS:
                self._hear(byte[0])
            elif not ready and not self.name and (name := self._launcher_says()):
                self._note(name)
        os.close(self._read_end)

    def _launcher_says(self) -> str:
        return "" if self._folder is None else text_of(self._folder / STOP)

    def _hear(self, number: int) -> None:
        self._num_interrupts += number == signal.SIGINT
        # Slurm's warning is followed by SIGTERM, a terminal's SIGHUP by that of its shell: only a
        # person who asks twice is in a hurry
        if self._num_interrupts > 1:
            os._exit(EXIT_INTERRUPTED)
        is_shown = os.environ.get("RANK", "0") == "0"
        if number == signal.SIGINT and self.when_asked == "hold" and is_shown:
            with suppress(OSError):  # nobody reads it any more
                os.write(2, b"meshwright: SIGINT: the job saves and stops; again: killed\n")
        self._note(signal.Signals(number).name)
        if number == signal.SIGTERM and self.when_asked == "hold":
            _later(JOIN_TIMEOUT_S, self._end_if_alone)

    def _note(self, name: str) -> None:
        if self.name:
            return
        self.name = name
        if self.when_asked == "exit":
            os._exit(self.exit_code)
        if self.when_asked == "raise":
            signal.pthread_kill(threading.main_thread().ident or 0, NUDGE)
            _later(STUCK_S, self._exit_if_stuck)

    @property
    def exit_code(self) -> int:
        """Exit code of this rank if it ends for the request without having to save."""
        return 128 + signal.SIGTERM if self.is_of_failure else code_of_request(self.look())

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.when_asked == "raise" and not self._is_raised:
            self.check()

    def _exit_if_stuck(self) -> None:
        # in the final export the main thread comes back, and reports the step that is saved
        if self.when_asked == "raise" and not (self._is_raised or self.has_trained):
            os._exit(self.exit_code)

    def _end_if_alone(self) -> None:
        """End as SIGTERM would have, unless the whole job is being stopped."""
        if not self.is_agreed and self._may_be_torchrun_s():
            os._exit(128 + signal.SIGTERM)


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, SIGKILL included, or has died."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes that Linux takes of a socket's path, less those that multiprocessing adds to a folder."""


def fork_server(*modules: str) -> "ForkServerContext":
    """Return the context that starts processes as forks of one that has imported `modules`.

    Ctrl-C is for the caller: a terminal sends it to all, and imports of seconds would answer by
    tracebacks.
    """
    import multiprocessing.forkserver  # not at the top: most commands start no process
    import multiprocessing.util

    if len(os.fsencode(before := tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()  # which it then keeps
        tempfile.tempdir = before
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    is_main = threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, usual)
    return context


def in_processes(
    tasks: Sequence[tuple[Any, ...]], function: Callable[..., Result], workers: int, what: str = ""
) -> list[Result]:
    """Return the result of `function` with each of `tasks`, in a new process for each.

    torch keeps meshes of groups that are gone in caches. Processes are forks of one that has
    imported the function's module, and has no threads.

    Args:
        what: shown on a terminal with how many have ended: "tried: 3 of 11"; "": nothing is.
    """
    # not at the top: most commands start no process
    from concurrent.futures import ProcessPoolExecutor, as_completed

    from tqdm import tqdm

    shown = {"bar_format": "{desc}: {n_fmt} of {total_fmt}", "disable": None if what else True}
    context = fork_server(function.__module__)
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        calls = [pool.submit(_call, function, task) for task in tasks]
        ended = as_completed(calls)
        try:
            for call in tqdm(ended, what, len(tasks), leave=False, file=sys.stderr, **shown):
                call.result()  # an error is raised at once
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [call.result() for call in calls]


def _call(function: Callable[..., Result], task: tuple[Any, ...]) -> Result:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    gc.freeze()  # or each full collection goes through all of torch's modules, for 0.3 s
    return function(*task)
