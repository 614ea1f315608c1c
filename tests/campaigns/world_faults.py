"""Faults of the world under a job of two machines, for `interruptions.py --world-faults`.

A machine is a launcher with one rank, in namespaces of its own for process numbers and the host
name, as a container has: both count processes from 1. The machines share the folder of the job.
A fault is a function as in `file_faults.py`, whose faults two machines can have as well. As root.
"""

import errno
import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.checkpoint import listing
from meshwright.system.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_SAVE,
    EXIT_STOPPED,
)
from tests.campaigns.file_faults import Fault, Start, Starter, WrongError, expect, wait_for_steps

NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")
IN_THEM = """
hosts=$(mktemp)
printf '127.0.0.1 localhost\\n127.0.0.2 machine0\\n127.0.0.3 machine1\\n' >"$hosts"
mount --bind "$hosts" /etc/hosts
rm "$hosts"
hostname "$0"
"$@"
"""
"""The shell is process 1, which ignores signals that it has no handler for, and passes on the exit
code of the launcher."""
STOPS = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1")
PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)
LONE = (1, EXIT_HANG, EXIT_SAVE, 128 + signal.SIGKILL, 128 + signal.SIGABRT)
"""Exit codes of a machine whose peer is gone."""


def on_machines(
    words: list[str], machines: int, only_first: dict[str, str | None] | None
) -> list[tuple[list[str], dict[str, str | None]]]:
    """Return the command and the environment variables of each machine's launcher.

    Args:
        only_first: variables of the first machine alone; None unsets one.
    """
    if machines == 1:
        return [(words, {})]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    meeting: dict[str, str | None] = {"NNODES": "2", "NGPU": "1", "RDZV_ENDPOINT": endpoint}
    commands = [[*NAMESPACES, "sh", "-c", IN_THEM, f"machine{n}", *words] for n in range(machines)]
    return [
        (command, meeting | ((only_first or {}) if n == 0 else {}))
        for n, command in enumerate(commands)
    ]


def launcher_of(machine: int) -> int | None:
    """Return the number, here, of the launcher that process `machine` started; None: not yet."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    shell = next(iter(parents.get(machine, [])), None)
    return next(iter(parents.get(shell, [])), None) if shell else None


def stop(begin: Starter, folder: Path, chance: random.Random) -> str:
    """A signal that asks to stop reaches one launcher, both, or a rank, once or as a pair."""
    start: Any = begin(folder)
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, 8))
    else:
        wait_for_steps(start, chance)
    names = chance.choice([(name,) for name in STOPS] + [("SIGUSR1", "SIGTERM")])
    launchers = [pid for machine in start.processes if (pid := launcher_of(machine.pid))]
    ranks = start.ranks() if start.has_begun else []
    targets = chance.choice([launchers, launchers[:1], launchers[1:], ranks[:1] or launchers])
    had_begun = start.has_begun
    for name in names:
        for target in targets:
            with suppress(ProcessLookupError):
                os.kill(target, signal.Signals[name])
        time.sleep(chance.uniform(0, 0.3))
    _let_no_machine_wait(start)
    # before the first step a machine may end while the other still waits for it
    codes = (
        (0, EXIT_STOPPED)
        if had_begun
        else (0, EXIT_STOPPED, EXIT_INTERRUPTED, 1, 129, 130, 137, 143)
    )
    code = expect(start, codes)
    if code == EXIT_STOPPED and had_begun and not listing.saved_steps(folder / "checkpoint"):
        raise WrongError(f"75, and nothing is saved\n{start.console.read_text()}")
    _finish(begin, folder)
    return f"{' and '.join(names)} to {len(targets)} of {len(launchers)} machines or ranks"


def kill(begin: Starter, folder: Path, chance: random.Random) -> str:
    """A rank, a launcher or a whole machine is killed."""
    start: Any = begin(folder)
    wait_for_steps(start, chance)
    whom = chance.choice(("rank", "launcher", "machine"))
    number = chance.randrange(2)
    machine = start.processes[number]
    target = {"rank": next(iter(start.ranks()), None), "launcher": launcher_of(machine.pid)}.get(
        whom, machine.pid
    )
    if target and not start.is_over:
        os.kill(target, signal.SIGKILL)
    expect(start, (0, *LONE), "meshwright: ")
    if 0 in start.codes and max(start.codes) and start.has_begun:
        raise WrongError(f"one machine ended with 0, its peer with {max(start.codes)}")
    _finish(begin, folder)
    return f"a {whom} killed"


def _kill_with_checkpoint(begin: Starter, folder: Path) -> Path:
    """Start the job, kill it after its first save, and return the newest checkpoint."""
    start = begin(folder)
    while not (start.is_over or listing.saved_steps(folder / "checkpoint")):
        time.sleep(0.01)
    start.kill()
    start.end()
    return listing.step_folder(
        folder / "checkpoint", listing.saved_steps(folder / "checkpoint")[-1]
    )


def passing_read_errors(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The newest checkpoint cannot be read for a while, when a job resumes."""
    newest = _kill_with_checkpoint(begin, folder)
    number, times = chance.choice(PASSING), chance.choice((1, 2))
    fault = {"FILE_FAULT_EVERYWHERE": f"passing:{number}:{times}:{newest}"}
    resumed = begin(folder, only_first=fault)
    expect(resumed, (0,))
    if f"/{newest.name} " not in resumed.console.read_text():
        raise WrongError(f"{newest.name} was not resumed\n{resumed.console.read_text()}")
    return f"{errno.errorcode[number]} {times} times"


def lasting_read_errors(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The newest checkpoint cannot be read at all, when a job resumes; later it can."""
    newest = _kill_with_checkpoint(begin, folder)
    number = chance.choice(PASSING)
    fault = {"FILE_FAULT_EVERYWHERE": f"passing:{number}:{10**6}:{newest}"}
    resumed: Any = begin(folder, only_first=fault)
    _let_no_machine_wait(resumed)
    resumed.end()
    if resumed.codes[0] != EXIT_DATA or os.strerror(number) not in resumed.console.read_text():
        raise WrongError(f"exit code {resumed.codes[0]}\n{resumed.console.read_text()}")
    if not newest.exists():
        raise WrongError(f"{newest} was set aside\n{resumed.console.read_text()}")
    _finish(begin, folder)
    return f"{errno.errorcode[number]} for ever"


def ill_driver(begin: Starter, folder: Path, chance: random.Random) -> str:
    """nvidia-smi fails, or hangs, on one machine: no training on its CPU in silence."""
    tools = folder.with_name(f"{folder.name}_tools")
    tools.mkdir()
    says = "Failed to initialize NVML: Driver/library version mismatch"
    script = chance.choice((f"echo '{says}'; exit 18", "sleep 1000"))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    ill: Any = begin(folder, only_first={"CUDA_VISIBLE_DEVICES": None, "PATH": path, "NGPU": None})
    while ill.processes[0].poll() is None:
        time.sleep(0.1)
    ill.kill()
    ill.end()
    if ill.codes[0] != EXIT_CONFIG or "nvidia-smi" not in ill.console.read_text():
        raise WrongError(f"exit code {ill.codes[0]}\n{ill.console.read_text()}")
    _finish(begin, folder)
    return f"nvidia-smi: {script}"


def clock(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The clock of one machine is wrong, by minutes or years; the job is killed and resumed."""
    days = chance.choice((-4000, -1, -0.01, 0.01, 1, 4000))
    wrong = {"FILE_FAULT_EVERYWHERE": f"clock:{days * 86400}"}
    start = begin(folder, only_first=wrong)
    wait_for_steps(start, chance)
    if chance.random() < 0.5:
        start.kill()
        start.end()
        start = begin(folder, only_first=wrong)
    expect(start, (0,))
    return f"a clock {days:+} days off"


def cold_caches(begin: Starter, folder: Path, chance: random.Random) -> str:
    """Both machines tokenise into one empty folder, whose file system may have no flock."""
    cache = folder.with_name(f"{folder.name}_cache")
    given = {"XDG_CACHE_HOME": str(cache)}
    number = chance.choice((0, errno.ENOLCK, errno.ENOSYS))
    if number:
        given["FILE_FAULT_EVERYWHERE"] = f"no_flock:{number}"
    elif chance.random() < 0.5:
        given["FILE_FAULT_EVERYWHERE"] = "idle_flock:0"  # it succeeds, and excludes nobody
    expect(begin(folder, **given), (0,))
    return "cold caches, " + given.get("FILE_FAULT_EVERYWHERE", "flock")


def second_job(begin: Starter, folder: Path, chance: random.Random) -> str:
    """Another job of two machines starts into the folder of one that runs."""
    first = begin(folder)
    wait_for_steps(first, chance)
    second = begin(folder, console=folder.with_suffix(".second.log"))
    expect(second, (0, EXIT_CONFIG), "another job uses ")
    expect(first, (0,))
    return "a second job"


def _let_no_machine_wait(start: Any) -> None:
    """Kill a machine that waits for one which has ended: otherwise it waits for 10 minutes, as on a
    cluster without a scheduler."""
    end = None
    while not start.is_over:
        if end is None and any(process.poll() is not None for process in start.processes):
            end = time.monotonic() + 45
        if end is not None and time.monotonic() > end:
            start.kill()
        time.sleep(0.05)


def _finish(begin: Starter, folder: Path) -> None:
    """Start the job again, without a fault, to its last step."""
    last: Start = begin(folder, console=folder.with_suffix(".last.log"))
    expect(last, (0,))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(stop, kill, passing_read_errors, lasting_read_errors, ill_driver, clock, cold_caches),
        second_job,
    )
}
