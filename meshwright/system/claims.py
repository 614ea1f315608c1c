"""Files that say which process works on something, on any number of machines, without a lock.

A claim is made exclusively, and says whose it is. Its owner moves its time of change on. It is dead
if its process is gone, as the system says on the machine of the owner, or if that time has stood
still for `SILENCE_S` by the clock of whoever looks. Clocks of two machines are never compared. No
lock of the file system is needed: NFS and its like have them, or not, or on one machine alone.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from meshwright.system.files import is_running, this_machine

BEAT_S = 5.0
"""Between two changes of a claim's time."""

SILENCE_S = 40.0
"""A claim that has not changed for so long is of a process that is gone."""


@dataclass(frozen=True)
class Owner:
    """A process that has claimed something."""

    host: str
    machine: str
    """As `this_machine` says."""
    pid: int
    job: str
    """As the user knows it; or ""."""
    nonce: str
    """No other claim has it."""

    @property
    def is_here(self) -> bool:
        """Whether this machine knows its process."""
        return bool(self.machine) and self.machine == this_machine()

    @property
    def is_gone(self) -> bool:
        """Whether its process has surely ended."""
        return self.is_here and not is_running(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class State(NamedTuple):
    """A claim, as it is now."""

    owner: Owner | None
    """None: it names none, or is being written."""
    changed_ns: int


def read(file: Path) -> State | None:
    """Return the state of a claim; None: there is none. It is opened: NFS then asks the server."""
    try:
        with open(file, "rb") as stream:
            content, changed_ns = stream.read(), os.fstat(stream.fileno()).st_mtime_ns
    except OSError:
        return None
    try:
        return State(Owner(**json.loads(content)), changed_ns)
    except (ValueError, TypeError):
        return State(None, changed_ns)


class Claim:
    """The right of this process to a file; kept alive by a thread while it has it."""

    def __init__(self, file: Path, nonce: str = "", job: str = "") -> None:
        self.file, nonce = file, nonce or secrets.token_hex(6)
        self.owner = Owner(socket.gethostname(), this_machine(), os.getpid(), job, nonce)
        self._seen: tuple[State | None, float] = None, 0.0
        self._is_over = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> bool:
        """Make the file, also in the place of one whose owner is gone; return whether it is ours.

        Raises:
            OSError: if it cannot be written.
        """
        for _ in range(2):
            if self._create():
                self._is_over.clear()
                self._beating = threading.Thread(target=self._beat, name="claim", daemon=True)
                self._beating.start()
                return True
            if not self.remove_if_dead():
                return False
        return False

    def give_back(self) -> bool:
        """Remove the file, if it was taken and is still ours; return whether it was.

        Raises:
            OSError: if it cannot be removed.
        """
        if self._beating is None:
            return False
        self._is_over.set()
        self._beating.join()
        self._beating = None
        if is_ours := self._is_ours():
            self.file.unlink()
        return is_ours

    def _create(self) -> bool:
        """Make the file; whether there was none. Its content comes a moment after its name."""
        try:
            file = open(self.file, "x", encoding="utf-8")  # noqa: SIM115
        except FileExistsError:
            return False
        try:
            with file:
                json.dump(asdict(self.owner), file, indent=2)
        except BaseException:  # the disk is full
            self.file.unlink(missing_ok=True)
            raise
        return True

    def remove_if_dead(self) -> bool:
        """Remove the file if its owner is surely gone; return whether it is. An owner whose process
        this machine does not know is so after calls over `SILENCE_S`."""
        state, now = read(self.file), time.monotonic()
        if state is None:  # given back just now
            return True
        if state != self._seen[0]:
            self._seen = state, now
        is_gone = state.owner is not None and state.owner.is_gone
        if not is_gone and now - self._seen[1] <= SILENCE_S:
            return False
        # of several that see it dead, one moves it; a claim that is new by then is put back
        own = self.file.with_name(f"{self.file.name}.{self.owner.nonce}")
        try:
            self.file.rename(own)
            if read(own) != state:
                try:
                    os.link(own, self.file)
                except FileExistsError:  # a third one was faster
                    pass
                except OSError:  # a file system without links
                    own.rename(self.file)
                return False
        except FileNotFoundError:
            return True
        finally:
            own.unlink(missing_ok=True)
        return True

    def _is_ours(self) -> bool:
        state = read(self.file)
        return state is not None and state.owner == self.owner

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with suppress(OSError):  # the next one may succeed; seven may fail
                if self._is_ours():
                    os.utime(self.file)
