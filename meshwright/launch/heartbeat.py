"""Each rank's last known step and phase, in a file that outlives it. Free of torch.

The launcher names a folder on its machine; a rank maps a file there into its memory. A beat writes
a few bytes into it: no system call, no lock, nothing for the device.
"""

import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.system.errors import EXIT_CODES

HEARTBEATS = "heartbeats"
"""Folder in the launcher's, on each node. The first rank there makes it."""

STACKS_SIGNAL = signal.SIGRTMIN + 1
"""Has a rank write its stacks for the launcher. SIGUSR2 is the user's, and writes to the log."""

EXAMINE = "examine"
"""File in the folder: asks every rank for its last collectives."""

LAYOUT = struct.Struct("<qqdd64s48s200s")
"""Beats so far, step, time of the beat, limit in s, phase, key of the limit, error."""

PHASE_BYTES = 64

FACTS_AT, SIZE = 512, 2048

FACTS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "machine": "GROUP_RANK",
    "machines": "GROUP_WORLD_SIZE",
}
"""torchrun's environment variables."""

LOOK_EVERY_S = 0.5

HOLD_S = 20
"""Seconds a rank whose collective timed out waits for the launcher to name the cause."""

TIMED_OUT = re.compile(r"tim(ed|es|ing) ?-?out|timeout", re.IGNORECASE)

UNTIL_TIMEOUT = 0.8
"""An error that comes earlier than this part of the limit isn't a timeout."""


@dataclass(frozen=True)
class Beat:
    """The file of one rank, as the launcher reads it."""

    rank: int
    pid: int
    count: int
    """Beats so far. All ranks take the same way, so the one with the fewest is behind."""
    step: int
    phase: str
    since: float
    """`time.monotonic()` of the beat."""
    limit_s: float
    limit_key: str
    failed: str
    """Error of a collective that timed out; empty if there is none."""
    facts: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where the rank was, in words."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase


class Heartbeat:
    """This rank's beats. Without a launcher that watches, they go nowhere.

    Args:
        folder: for the file; None: nobody watches.
        facts: constants of this rank that the launcher needs, for JSON: "rank" among them.
    """

    def __init__(self, folder: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self._map: mmap.mmap | bytearray = bytearray(SIZE)
        self._count, self._step, self._phase, self._since = 0, 0, b"start", time.monotonic()
        self._limit_s, self._limit_key = 0.0, b""
        self._folder, self._stacks = folder, None
        if folder is None:
            return
        facts = {"pid": os.getpid(), **(facts or {})}
        folder.mkdir(exist_ok=True)
        path = folder / f"rank_{facts['rank']}.beat"
        unfinished = path.with_suffix(".new")
        unfinished.write_bytes((b"\0" * FACTS_AT + json.dumps(facts).encode()).ljust(SIZE, b"\0"))
        with unfinished.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._write(b"")
        self._stacks = path.with_suffix(".stacks").open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks)
        # last: a rank with this file is sent the signal, and must handle it
        unfinished.replace(path)

    def update(self, phase: str, step: int | None = None) -> None:
        """Note that this rank enters `phase`. All ranks do so alike, in the same order.

        Args:
            step: the one under way; None: as before.
        """
        if step is not None:
            self._step = step
        self._count += 1
        self._phase, self._since = phase.encode(), time.monotonic()
        assert len(self._phase) <= PHASE_BYTES, phase
        self._write(b"")

    def limit(self, seconds: float, key: str) -> None:
        """Note the limit on waiting from now on, and the key of the config that sets it."""
        self._limit_s, self._limit_key = seconds, key.encode()
        self._write(b"")

    def _write(self, failed: bytes) -> None:
        values = (self._since, self._limit_s, self._phase, self._limit_key, failed)
        LAYOUT.pack_into(self._map, 0, self._count, self._step, *values)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Give the launcher the time to name the rank that others waited for until a timeout."""
        try:
            yield
        except RuntimeError as error:
            waited_s = time.monotonic() - self._since
            is_late = waited_s >= UNTIL_TIMEOUT * self._limit_s
            is_timeout = is_late and TIMED_OUT.search(str(error))
            is_own = isinstance(error, tuple(EXIT_CODES))  # all ranks report it
            if self._stacks is not None and is_timeout and not is_own:
                traceback.print_exception(error, file=self._stacks)
                self._stacks.flush()
                self._write(str(error).encode()[:200])
                time.sleep(HOLD_S)  # the launcher ends this process before
            raise

    def answer(self, last_collectives: Callable[[], str]) -> None:
        """Write `last_collectives` to a file, from a thread, when the launcher asks."""
        if self._stacks is None or self._folder is None:
            return
        folder, path = self._folder, Path(self._stacks.name).with_suffix(".collectives")

        def wait() -> None:
            answered = 0
            while True:
                time.sleep(LOOK_EVERY_S)
                with suppress(OSError):  # it isn't there yet; or a full disk
                    if (asked := (folder / EXAMINE).stat().st_mtime_ns) > answered:
                        answered = asked
                        path.write_text(last_collectives(), "utf-8")

        threading.Thread(target=wait, name="heartbeat", daemon=True).start()


def heartbeat_of_this_rank(folder: str) -> Heartbeat:
    """Return the heartbeat of a rank that torchrun started, watched if its launcher is ours.

    A rank alone waits for nobody.

    Args:
        folder: the launcher's, as `Launch` has it.
    """
    env = os.environ
    if not folder or env.get("WORLD_SIZE", "1") == "1":
        return Heartbeat()
    facts = {name: int(env[variable]) for name, variable in FACTS.items()}
    try:
        return Heartbeat(Path(folder) / HEARTBEATS, facts)
    except OSError:  # a full disk: the job can do without
        return Heartbeat()


def read_beats(folder: Path) -> list[Beat]:
    """Return the beats in `folder` by rank; none if no rank has started."""
    return sorted(map(_read, folder.glob("rank_*.beat")), key=lambda beat: beat.rank)


def _read(path: Path) -> Beat:
    data = path.read_bytes()
    while (again := path.read_bytes()) != data:  # until no beat falls into a read
        data = again
    facts = json.loads(data[FACTS_AT:].rstrip(b"\0"))
    count, step, since, limit_s, phase, key, failed = LAYOUT.unpack_from(data)
    texts = (text.rstrip(b"\0").decode("utf-8", "replace") for text in (phase, key, failed))
    phase, key, failed = texts
    return Beat(facts["rank"], facts["pid"], count, step, phase, since, limit_s, key, failed, facts)
