"""Lets one job at a time write checkpoints into a folder: a file there names it. Free of torch.

Only the first rank of a job has to do with it. The file is `job.lock`: whose it is, its machine and
its process. A job runs as long as the file's time of change moves on, which the job sees to every
few seconds; on the machine of the job the system also says whether its process is gone. No lock of
the file system is needed: NFS and its like have them, or not, or on one machine alone.
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

from pydantic import TypeAdapter, ValidationError

from meshwright.system.errors import ConfigError
from meshwright.system.files import is_running, this_machine, whole_file
from meshwright.system.log import logger

FILE = "job.lock"

BEAT_S = 10.0
"""Between two changes of the file's time."""

SILENCE_S = 40.0
"""A job whose file has not changed for so long is gone."""

GRACE_S = 5.0
"""For so long a running job is waited for: it may be about to end."""

POLL_S = 0.25

JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
"""Variables of the environment that may say how the user knows the job."""


class TakenOverError(OSError):
    """Another job writes to the folder by now."""


@dataclass(frozen=True)
class Owner:
    """A job that writes checkpoints."""

    host: str
    machine: str
    """Equal where process numbers mean the same: one boot of a kernel, one namespace of them."""
    pid: int
    job: str
    nonce: str
    """12 hexadecimal digits, with which all names of its unfinished checkpoints begin."""

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


_OWNER = TypeAdapter(Owner)


class Claim:
    """The right of this process to write checkpoints into `folder`; kept alive by a thread."""

    def __init__(self, folder: Path, nonce: str) -> None:
        self._folder, self._file = folder, folder / FILE
        job = next((os.environ[name] for name in JOB_IDS if os.environ.get(name)), "")
        self._me = Owner(socket.gethostname(), this_machine(), os.getpid(), job, nonce)
        self._is_over = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Become the folder's job; wait a little for another to end, or to prove gone.

        Raises:
            ConfigError: if another job runs.
            OSError: if the folder cannot be written, or something else has the file's name.
        """
        begun = changed = time.monotonic()
        seen: State | None = None
        has_beaten = False
        while not self._create():
            time.sleep(POLL_S)
            now, state = time.monotonic(), _read(self._file)
            owner = None if state is None else state.owner
            if owner is None:  # between a job that ends and one that begins; or it is a user's
                if now - begun > GRACE_S:
                    raise FileExistsError(f"{self._file} is in the way, and not of a job")
                continue
            if state != seen:
                has_beaten, changed, seen = seen is not None, now, state
            is_earlier = owner.is_here and owner.pid == self._me.pid  # a job of this process
            if owner.is_gone or is_earlier or now - changed > SILENCE_S:
                self._replace(seen)
                break
            if has_beaten and now - begun > GRACE_S:
                self._refuse(owner)
            if changed == now:
                logger.info("waiting for %s, which writes checkpoints to %s", owner, self._folder)
        self._beating = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._beating.start()

    def give_back(self) -> None:
        """Let another job have the folder, and remove that if it is empty.

        Does nothing if the folder was not taken, or was taken over.
        """
        self._is_over.set()
        if self._beating is None:
            return
        self._beating.join()
        self._beating = None
        try:
            if holder(self._folder) == self._me:
                self._file.unlink()
                with suppress(OSError):  # it holds checkpoints
                    self._folder.rmdir()
        except OSError as error:
            logger.warning("%s could not be removed: %s", self._file, error)

    def _create(self) -> bool:
        """Make the file; whether there was none. Its content comes a moment after its name."""
        try:
            file = open(self._file, "xb")  # noqa: SIM115
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content())
        except BaseException:  # the disk is full
            self._file.unlink(missing_ok=True)
            raise
        return True

    def _replace(self, seen: "State | None") -> None:
        """Put our name in the place of one that is gone.

        Two jobs may do so at once. Both then look whose name is there; and the first to lose would
        find out at its next save, for nothing is published without `check_claim`.
        """
        if _read(self._file) == seen:
            with whole_file(self._file) as file:
                file.write(self._content())
        time.sleep(POLL_S)
        if (owner := holder(self._folder)) != self._me:
            self._refuse(owner)

    def _refuse(self, owner: Owner | None) -> None:
        raise ConfigError(
            "job.dump_folder",
            f"job.dump_folder: another job writes checkpoints to {self._folder}: "
            f"{owner or 'it has not said which'}\n  fix: wait until it has ended, or use another "
            f"job.dump_folder; if you know that it has ended, remove {self._file}",
        )

    def _content(self) -> bytes:
        return (json.dumps(asdict(self._me), indent=2) + "\n").encode()

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            try:
                if holder(self._folder) == self._me:
                    os.utime(self._file)
            except OSError:
                pass  # the next one may succeed; four may fail


def new_nonce() -> str:
    """12 hexadecimal digits that no other job has."""
    return secrets.token_hex(6)


def check_claim(folder: Path, nonce: str) -> None:
    """Check that no job but the one with `nonce` has claimed `folder`, and still runs.

    (On a full disk the file could not be written; a killed job's file may be there.)

    Raises:
        TakenOverError: if one has.
    """
    owner = holder(folder)
    if owner is not None and not (nonce.startswith(owner.nonce) or owner.is_gone):
        raise TakenOverError(f"another job writes checkpoints to {folder} now: {owner}")


def holder(folder: Path) -> Owner | None:
    """Return the job that has claimed `folder`, if there is one that can be read."""
    state = _read(folder / FILE)
    return None if state is None else state.owner


class State(NamedTuple):
    """The file, as it is now."""

    owner: Owner | None
    """None: it names none."""
    changed_ns: int


def _read(file: Path) -> State | None:
    """Return the file's state. It is opened: NFS then asks the server."""
    try:
        with open(file, "rb") as stream:
            content, changed_ns = stream.read(), os.fstat(stream.fileno()).st_mtime_ns
        return State(_OWNER.validate_json(content), changed_ns)
    except OSError:
        return None
    except ValidationError:
        return State(None, changed_ns)
