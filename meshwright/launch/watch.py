"""The launcher's thread that watches the ranks of its machine, and ends a job that hangs."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.launch.hang import STOPPED, Evidence, culprits, report, verdict
from meshwright.launch.heartbeat import EXAMINE, LOOK_EVERY_S, STACKS_SIGNAL, Beat, read_beats
from meshwright.system.errors import ConfigError

ANSWER_S = 1.5
"""Seconds that ranks get to write their stacks and last collectives."""

MACHINES_S = 8.0
"""Seconds that other machines get to tell of their ranks."""

WRITE_S = 3.0
"""Seconds to write the report."""

ASK_MACHINES_EVERY_S = 2.0

LONGEST_GAP_S = 5.0
"""Between two looks; after a longer one this process was stopped itself, and so was the job."""

ABORTED = "Watchdog caught collective operation timeout"
"""NCCL's last words on stderr before it aborts a rank: torch, ProcessGroupNCCL.cpp."""

NEARLY = 0.8
"""Part of the limit that a rank has waited for at least, if it was ended because of it."""

WARN_AFTER_S = 3.0
"""Seconds beyond the limit: a timeout of the ranks' own, which says more, comes first."""

TAIL_BYTES = 2**16


class Watch:
    """A thread that looks at the heartbeats, and ends the ranks here if the job hangs.

    Attributes:
        verdict: lines about the hang, the cause last; None if there is none.
        began: seconds of the epoch.

    Args:
        folder: of the heartbeats.
        stderr: returns the file with the stderr of a rank, by its number on this machine.
        reports: returns the folder for the stacks.
        say: gets warnings.
    """

    def __init__(
        self,
        folder: Path,
        stderr: Callable[[int], Path | None],
        reports: Callable[[], Path],
        say: Callable[[str], None],
    ) -> None:
        self.verdict: list[str] | None = None
        self.began = time.time()
        self._folder, self._stderr, self._reports, self._say = folder, stderr, reports, say
        self._stopped_since: dict[int, float] = {}
        self._warned: set[tuple[int, int]] = set()
        self._looked_at = self._asked_at = time.monotonic()
        self._machines: Machines | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()  # a verdict under way is finished

    def last_place(self, rank: int) -> str:
        """Return the last known phase and step of a rank; "" if there is none."""
        beat = self._last_beat(rank)
        return beat.place if beat is not None else ""

    def last_step(self, rank: int) -> int | None:
        """Return the step that a rank was in; None if it was not on this machine, or alone."""
        beat = self._last_beat(rank)
        return beat.step if beat is not None else None

    def _last_beat(self, rank: int) -> Beat | None:
        return next((beat for beat in read_beats(self._folder) if beat.rank == rank), None)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if now - self._looked_at > LONGEST_GAP_S:
                self._stopped_since.clear()
            self._looked_at = now
            beats = read_beats(self._folder)
            if beats and self._is_hung(beats, now):
                self._conclude(beats)
                return

    def _is_hung(self, beats: Sequence[Beat], now: float) -> bool:
        for beat in beats:
            state = state_of(beat.pid)
            if beat.failed:
                return True
            if state and state in STOPPED:
                since = self._stopped_since.setdefault(beat.rank, now)
                if now - since >= beat.limit_s > 0:
                    return True
            else:
                self._stopped_since.pop(beat.rank, None)
            waited_s = now - beat.since
            if state in ("", "Z") and waited_s >= NEARLY * beat.limit_s > 0 and self._aborted(beat):
                return True
        self._warn(beats, now)
        return self._machine_found_one(beats[0], now)

    def _aborted(self, beat: Beat) -> bool:
        path = self._stderr(beat.facts["local_rank"])
        return path is not None and ABORTED in tail(path)

    def _warn(self, beats: Sequence[Beat], now: float) -> None:
        """Name the ranks that do not wait for others though the limit is over.

        This does not prove a hang: a save may take longer, and so may a step without a collective.
        """
        late = [beat for beat in beats if now - beat.since - WARN_AFTER_S >= beat.limit_s > 0]
        new = {(beat.rank, beat.count) for beat in late} - self._warned
        if len(late) < len(beats) or not new:
            return
        self._warned |= new
        for rank in culprits(self._examine(beats)):
            self._say(
                f"rank {rank.rank} has been in {rank.place} for {rank.age_s:.0f} s, longer than "
                f"{rank.limit_key}; the others wait for it (its state: {rank.state or 'dead'})"
            )

    def _machine_found_one(self, beat: Beat, now: float) -> bool:
        if beat.facts["machines"] < 2 or now - self._asked_at < ASK_MACHINES_EVERY_S:
            return False
        self._asked_at = now
        if self._machines is None:
            with suppress(RuntimeError):  # it is there once torchrun has begun, and not at its end
                self._machines = Machines(beat)
        return self._machines is not None and self._machines.is_trouble()

    def _examine(self, beats: Sequence[Beat]) -> list[Evidence]:
        """Have the ranks here write their stacks and last collectives, and collect everything."""
        states = {beat.rank: state_of(beat.pid) for beat in beats}  # which the question may change
        with suppress(OSError):  # a full disk: there are stacks without the collectives
            (self._folder / EXAMINE).touch()
        for beat in beats:
            if not beat.failed:  # it has written them
                _kill(beat.pid, STACKS_SIGNAL)
        time.sleep(ANSWER_S)
        return [
            _evidence(beat, self._folder, states[beat.rank]) for beat in read_beats(self._folder)
        ]

    def _conclude(self, beats: Sequence[Beat]) -> None:
        is_stopped = {beat.pid for beat in beats if state_of(beat.pid) == "T"}
        evidence = self._examine(beats)
        if is_stopped:  # with the signal that is pending it writes its stacks; then it is ended
            for pid in is_stopped:
                _kill(pid, signal.SIGCONT)
            time.sleep(ANSWER_S / 3)
            evidence = [
                replace(rank, stacks=_read(self._folder / f"rank_{rank.rank}.stacks"))
                for rank in evidence
            ]
        facts = beats[0].facts
        if facts["machines"] > 1:
            with suppress(RuntimeError):
                self._machines = self._machines or Machines(beats[0])
                evidence = self._machines.exchange(evidence)
        where = self._write(f"hang_{facts['machine']}.txt", report(evidence))
        self.verdict = verdict(evidence, facts["world_size"], where)
        for beat in beats:
            _kill(beat.pid, signal.SIGKILL)

    def _write(self, name: str, text: str) -> str:
        """Write a report; return its path, or "" if that fails or takes too long."""
        written: list[str] = []

        def write() -> None:
            path = self._reports() / name
            path.write_text(text, "utf-8")
            written.append(str(path))

        try_to_write(write)
        return written[0] if written else ""


class Machines:
    """The launchers of the other machines, by way of the store that torchrun has for the ranks.

    Raises:
        RuntimeError: (every method) if the store does not answer.
    """

    def __init__(self, beat: Beat) -> None:
        host, port = beat.facts["store"]
        timeout = timedelta(seconds=MACHINES_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store = dist.PrefixStore("meshwright_hang", store)
        self._machine, self._count = beat.facts["machine"], beat.facts["machines"]

    def is_trouble(self) -> bool:
        """Return whether any machine has found a hang. A store that is gone is not one."""
        with suppress(RuntimeError):
            return bool(self._store.check(["trouble"]))
        return False

    def exchange(self, evidence: Sequence[Evidence]) -> list[Evidence]:
        """Send the others the evidence on the ranks here; return all evidence in time."""
        self._store.set("trouble", "yes")
        self._store.set(f"of {self._machine}", json.dumps([asdict(rank) for rank in evidence]))
        keys = {f"of {machine}" for machine in range(self._count)}
        told: list[Evidence] = []
        end = time.monotonic() + MACHINES_S
        while keys and time.monotonic() < end:
            for key in [key for key in keys if self._store.check([key])]:
                told += [Evidence(**rank) for rank in json.loads(self._store.get(key))]
                keys.remove(key)
            time.sleep(LOOK_EVERY_S / 5)
        with suppress(RuntimeError):  # the store ends with the launcher that has it, so wait
            self._store.add("done", 1)
            while self._store.add("done", 0) < self._count and time.monotonic() < end:
                time.sleep(LOOK_EVERY_S / 5)
        return sorted(told, key=lambda rank: rank.rank)


def _evidence(beat: Beat, folder: Path, state: str) -> Evidence:
    return Evidence(
        **vars(beat),
        host=socket.gethostname(),
        age_s=time.monotonic() - beat.since,
        state=state,
        stacks=_read(folder / f"rank_{beat.rank}.stacks"),
        collectives=_read(folder / f"rank_{beat.rank}.collectives"),
    )


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" if it is gone."""
    _, _, after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")
    return after_name.split()[0] if after_name else ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a file of text."""
    with path.open("rb") as stream:
        stream.seek(max(path.stat().st_size - size, 0))
        return stream.read().decode("utf-8", "replace")


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone; or its number is another user's
        os.kill(pid, number)


def try_to_write(write: Callable[[], None]) -> None:
    """Call `write`, and wait for seconds at most: the file system may be the cause of a hang."""

    def run() -> None:
        with suppress(OSError, ConfigError):
            write()

    thread = threading.Thread(target=run, name="report", daemon=True)
    thread.start()
    thread.join(WRITE_S)
