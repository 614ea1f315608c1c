"""Lets one job at a time use a folder of checkpoints: a lease there names it. Free of torch.

Only the first rank of a job takes it. Its file is `job.lock`; `job.txt` has the job's number.
"""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import OwnerRecord

from meshwright.system import slurm
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.system.files import NamedPath, make_folder, only_warn, text_of
from meshwright.system.lease import Lease, describe, is_gone, is_here, owner_of
from meshwright.system.log import logger

if TYPE_CHECKING:
    from meshwright.checkpoint.on_ranks import AllRanks

FILE, JOB_FILE = "job.lock", "job.txt"

GRACE_S = 5.0
"""For so long a running job is waited for: it may be about to end."""

POLL_S = 0.25

NONCE_DIGITS = 12


class TakenOverError(OSError):
    """Another job writes to the folder by now."""


class JobLease:
    """The right of this job to use the checkpoints in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lease = folder, Lease(folder / FILE)
        self._made = [folder]
        self.nonce = ""
        """Names of the job's unfinished checkpoints start with it: the first digits of the lease's
        token. "" until it is taken."""

    def take(self) -> None:
        """Become the folder's job; wait a little for another to end, or to prove gone. The folder
        is made, if need be.

        Raises:
            ConfigError: if another job runs.
            OSError: if the folder can't be written, or something else has the file's name, or this
                user may not read it.
        """
        begun, file = time.monotonic(), self._lease.file
        above = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._made = above or [self._folder]
        make_folder(self._folder)
        if _is_of_a_user(file):
            raise FileExistsError(f"{file} exists, and no job wrote it")
        is_waiting = False
        while not self._lease.take():
            if not is_waiting:
                logger.info("waiting for %s, which uses %s", holder(self._folder), self._folder)
            is_waiting = True
            if self._lease.was_touched and time.monotonic() - begun > GRACE_S:
                self._refuse()
            time.sleep(POLL_S)
        self.nonce = str(self._lease.token)[:NONCE_DIGITS]
        if job := slurm.job_name(os.environ) or os.environ.get("TORCHELASTIC_RUN_ID", ""):
            with only_warn("%s could not be written", self._folder / JOB_FILE):
                (self._folder / JOB_FILE).write_text(f"{self.nonce} {job}\n", "utf-8")

    def give_back(self) -> None:
        """Let another job have the folder, and remove that if it is empty, as the folders made for
        it. Does nothing if it wasn't taken, or was taken over."""
        with only_warn("%s could not be removed", self._lease.file):
            if not self._lease.is_ours():
                self._lease.give_back()
                return
            (self._folder / JOB_FILE).unlink(missing_ok=True)
            self._lease.give_back()
            with suppress(OSError):  # it holds checkpoints
                for folder in self._made:
                    folder.rmdir()

    def _refuse(self) -> None:
        raise ConfigError(
            "job.dump_folder",
            f"job.dump_folder: another job uses {self._folder}: {holder(self._folder)}"
            "\n  fix: wait until it has ended, or use a different "
            f"job.dump_folder; if you know that it has ended, remove {self._lease.file}",
        )


def new_nonce() -> str:
    """12 hexadecimal digits that no other job has."""
    return secrets.token_hex(NONCE_DIGITS // 2)


def check_lease(folder: Path, nonce: str) -> None:
    """Raise `TakenOverError` if a job that runs, and isn't the one with `nonce`, has the lease on
    `folder`. There may be none (the disk was full), or a killed job's."""
    owner = owner_of(folder / FILE)
    if owner is not None and not nonce.startswith(nonce_of(owner)) and not is_gone(owner):
        raise TakenOverError(f"another job uses {folder} now: {holder(folder)}")


def holds(folder: Path, nonce: str) -> bool:
    """Return whether the job with `nonce` has the lease on `folder`, as seen from here."""
    owner = owner_of(folder / FILE)
    return owner is not None and nonce_of(owner) == nonce


SEEN_WITHIN_S = 10.0
"""Seconds that a rank looks for the file. Network file systems show a new one late."""


def check_shared(folder: Path, nonce: str, ranks: "AllRanks") -> None:
    """Raise `ConfigError` on every rank if one doesn't see the lease on `folder` that the first
    rank has taken, with `nonce`. Collective."""

    def find_blind_host() -> str:
        end = time.monotonic() + SEEN_WITHIN_S
        while not holds(folder, nonce):
            if time.monotonic() > end:
                return socket.gethostname()
            time.sleep(0.2)
        return ""

    hosts = ranks.on_every(find_blind_host)
    blind = [rank for rank, host in enumerate(hosts) if host]
    NamedPath("job.dump_folder", folder).check(
        not blind,
        f"rank {in_ranges(blind)} (on {', '.join(sorted({*hosts} - {''}))}) does not see what "
        "rank 0 writes there",
        "name a folder on a file system that all nodes share",
    )


def nonce_of(owner: OwnerRecord) -> str:
    """Return the nonce of the job that has the lease."""
    return str(owner.token)[:NONCE_DIGITS]


def holder(folder: Path) -> str:
    """Return the job that has the lease on `folder` in words: process 12 on node7 (job 77)."""
    owner = owner_of(folder / FILE)
    if owner is None:
        return "unknown"
    nonce, _, job = text_of(folder / JOB_FILE).strip().partition(" ")
    return describe(owner) + (f" (job {job})" if nonce == nonce_of(owner) else "")


def running_here(folder: Path) -> str:
    """Return the job of this node that uses `folder`, as `holder` does; "": none does."""
    owner = owner_of(folder / FILE)
    is_running = owner is not None and is_here(owner) and not is_gone(owner)
    return holder(folder) if is_running else ""


def _is_of_a_user(file: Path) -> bool:
    """Return whether something that no job wrote has the lease's name."""
    # empty, or of zeros, after a power cut; a JSON object, if an earlier version wrote it
    text = text_of(file).strip("\0")
    return bool(text) and not text.startswith(("filelock/", "{"))
