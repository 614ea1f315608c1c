"""Which process makes which part of a cache, on any number of machines, without a lock.

A claim is a file beside the part, made exclusively: whose it is, and a number that its owner counts
up. A claim is dead if its process is gone, as the system says on the machine of the owner, or if
the number has stood still for `SILENCE_S` by the clock of whoever looks. Clocks of two machines are
never compared. A claim saves work, and nothing else depends on it: if two processes make a part,
both write the same bytes under names of their own, and the last one gives it its name.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.system.files import is_running, this_machine

BEAT_S = 5.0
"""Between two numbers."""

SILENCE_S = 40.0
"""A claim whose number has not changed for so long is of a process that is gone."""


@dataclass
class _Seen:
    content: bytes
    since: float
    """`time.monotonic()` when it was seen first."""


class Claims:
    """The claims of this process in the folder of a cache; a thread keeps them alive."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._nonce = folder, secrets.token_hex(6)
        self._held, self._guard = set[str](), threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> "Claims":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)

    def take(self, name: str) -> bool:
        """Claim `name`, also from a process that is gone; return whether it is ours."""
        path = self._folder / f"{name}.claim"
        for _ in range(2):
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                if not self._remove_if_dead(path):
                    return False
                continue
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self._content(0))
            except OSError:  # the disk is full
                path.unlink(missing_ok=True)
                raise
            with self._guard:
                self._held.add(name)
            return True
        return False

    def release(self, name: str) -> None:
        """Give a claim back."""
        path = self._folder / f"{name}.claim"
        with self._guard, suppress(OSError):  # not while it is counted up
            self._held.discard(name)
            if self._is_ours(path):
                path.unlink()

    def now(self) -> float:
        """Return the time by the clock of the file system."""
        path = self._folder / f"{self._nonce}.clock"
        path.touch()
        try:
            return path.stat().st_mtime
        finally:
            path.unlink(missing_ok=True)

    def _content(self, beat: int) -> bytes:
        owner = {
            "host": socket.gethostname(),
            "machine": this_machine(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "beat": beat,
        }
        return json.dumps(owner).encode()

    def _is_ours(self, path: Path) -> bool:
        return self._nonce.encode() in path.read_bytes()

    def _remove_if_dead(self, path: Path) -> bool:
        """Remove a claim if its owner is surely gone; return whether it is."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # given back just now
            return True
        seen = self._seen.get(path.name)
        if seen is None or seen.content != content:
            seen = self._seen[path.name] = _Seen(content, time.monotonic())
        is_silent = time.monotonic() - seen.since > SILENCE_S
        if not is_silent and not _is_gone(content):
            return False
        # of several that see it dead, one moves it; a claim that is new by then is put back
        own = path.with_name(f"{path.name}.{self._nonce}")
        try:
            path.rename(own)
            if own.read_bytes() != content:
                with suppress(OSError):
                    os.link(own, path)
                return False
        except FileNotFoundError:
            return True
        finally:
            own.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        beat = 0
        while not self._is_over.wait(BEAT_S):
            beat += 1
            with self._guard:
                for name in self._held:
                    path = self._folder / f"{name}.claim"
                    with suppress(OSError):  # the next one may succeed; seven may fail
                        if self._is_ours(path):
                            with path.open("r+b") as file:  # one that is gone does not come back
                                file.write(self._content(beat))


def _is_gone(content: bytes) -> bool:
    """Return whether the owner was a process of this machine that has ended."""
    try:
        owner = json.loads(content)
        machine, pid = str(owner["machine"]), int(owner["pid"])
    except (ValueError, KeyError, TypeError):  # it is being written
        return False
    return bool(machine) and machine == this_machine() and not is_running(pid)
