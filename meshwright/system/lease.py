"""Files that say which process works on something, on any number of nodes, without a lock.

`filelock.SoftFileLease` makes the file, touches it while its process runs, and gives it to another
at once if the process is gone, or after `LEASE_S` without a touch by the clock of the other. No
lock of the file system is needed: NFS and its like have them, or not, or on one node only.

A lease is a hint: a process that was suspended for longer wakes up next to its successor. Whoever
can't afford that compares `token` with the file's before the last step, as checkpoints do.
"""

import os
import socket
import time
from pathlib import Path
from typing import Self

from filelock import OwnerRecord, SoftFileLease, Timeout

from meshwright.system.files import is_running

BEAT_S = 5.0
"""Between two touches of the file."""

LEASE_S = 40.0
"""A file that nobody has touched for so long is of a process that is gone."""

POLL_S = 0.25

STUCK_S = 2.0
"""filelock had so long to replace a file whose process is gone. It can't on a file system that
can't exchange two names, such as NFS, nor while a killed process waits for its parent."""

FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the first namespace of process numbers. Source: PROC_PID_INIT_INO in Linux's
proc_ns.h."""


class Lease:
    """The right of this process to a file; a thread touches it while the process has it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        # not of one thread: a different thread may give it back
        self._lease = SoftFileLease(
            file, lease_duration=LEASE_S, heartbeat_interval=BEAT_S, thread_local=False
        )
        self._seen: tuple[int, int] | None = None
        self._unchanged_since = 0.0
        self.was_touched = False
        """Another process has touched the file since the first `take`: it runs."""

    def take(self) -> bool:
        """Make the file, also in the place of one whose owner is gone; return whether it is ours.

        Raises:
            OSError: if it can't be written.
        """
        for _ in range(2):
            try:
                self._lease.acquire(blocking=False)
                return True
            except Timeout:
                if not self._remove_if_stuck():
                    return False
        return False

    def give_back(self) -> None:
        """Remove the file, if it was taken and is still ours.

        Raises:
            OSError: if it can't be removed.
        """
        self._lease.release()

    def __enter__(self) -> Self:
        while not self.take():
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    @property
    def token(self) -> str | None:
        """32 hexadecimal digits that no other lease has; None: this process doesn't have it."""
        return self._lease.token

    def is_ours(self) -> bool:
        """Return whether this process has taken the file, and nobody else since."""
        owner = self._lease.owner
        return self.token is not None and owner is not None and owner.token == self.token

    @property
    def owner(self) -> OwnerRecord | None:
        """The owner in the file; None: there is no file, or it has no owner."""
        return self._lease.owner

    def _remove_if_stuck(self) -> bool:
        """Remove a file that filelock can't replace; return whether it is gone.

        Of several processes that do so at once, one may remove the new file of another, which
        then notices that it has lost its lease.
        """
        owner, state, now = self.owner, self._state(), time.monotonic()
        if state is None:
            return True
        if state != self._seen:
            self.was_touched = self._seen is not None
            self._seen, self._unchanged_since = state, now
        silence_s = now - self._unchanged_since
        has_ended = owner is not None and is_gone(owner)
        if silence_s < STUCK_S or not (has_ended or silence_s > LEASE_S + STUCK_S):
            return False
        if self._state() == state:
            self._lease.force_break()
        return True

    def _state(self) -> tuple[int, int] | None:
        try:
            # opened, not only looked at: NFS then asks the server
            with open(self.file, "rb") as stream:
                status = os.fstat(stream.fileno())
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def owner_of(file: Path) -> OwnerRecord | None:
    """Return whom a lease's file names; None: there is no file, or it has no owner."""
    return SoftFileLease(file).owner


def is_here(owner: OwnerRecord) -> bool:
    """Return whether this node knows the process of `owner` by its number."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = FIRST_NAMESPACE
    # as filelock names a node; if it names it in another way, no owner is here, and who waits for
    # one waits for `LEASE_S`
    suffix = "" if namespace == FIRST_NAMESPACE else f"?pidns-{namespace:x}"
    return owner.hostname == f"{socket.gethostname()}{suffix}"


def is_gone(owner: OwnerRecord) -> bool:
    """Return whether the process of `owner` has surely ended."""
    return is_here(owner) and not is_running(owner.pid)


def describe(owner: OwnerRecord) -> str:
    """Return the process in words: process 12 on node7."""
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
