"""One job at a time writes checkpoints into a folder: a file there names it. Free of torch.

Only the first rank of a job has to do with it. The file is `job.lock`: whose it is, its machine and
its process. On the same machine the system says whether that process runs. On another machine it
runs while the file's time of change moves on, which the job sees to every few seconds. No lock of
the file system is needed: NFS and its like have them, or not, or on one machine alone.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.system.errors import ConfigError
from meshwright.system.files import UNSUPPORTED, this_machine
from meshwright.system.log import logger

FILE = "job.lock"


BEAT_S = 10.0
"""Between two changes of the file's time."""


SILENCE_S = 40.0
"""A job on another machine whose file has not changed for so long is gone."""


LOCAL_S = 5.0
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
    started: str
    """When the process was started, in the kernel's clock ticks: numbers are used again."""
    job: str
    nonce: str
    """12 hexadecimal digits, with which all names of its unfinished checkpoints begin."""

    @property
    def is_gone(self) -> bool | None:
        """Whether the process has ended; None if that cannot be seen from this machine."""
        if not self.machine or self.machine != this_machine():
            return None
        return _started(self.pid) != self.started

    @property
    def is_this_process(self) -> bool:
        return self.pid == os.getpid() and self.is_gone is False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class Claim:
    """The right of this process to write checkpoints into `folder`; kept alive by a thread."""

    def __init__(self, folder: Path, nonce: str) -> None:
        self._folder, self._file = folder, folder / FILE
        self._me = _this_process(nonce)
        self._is_over = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Become the folder's job; wait a little for another to end, or to prove gone.

        Raises:
            ConfigError: if another job runs.
            OSError: if the folder cannot be written, or something else has the file's name.
        """
        begun = changed = time.monotonic()
        seen: tuple[bytes, int] | None = None
        has_beaten = is_printed = False
        while not self._create():
            time.sleep(POLL_S)
            now, state = time.monotonic(), _read(self._file)
            owner = None if state is None else parse(state[0])
            if owner is None:  # between a job that ends and one that begins; or it is a user's
                if now - begun > LOCAL_S:
                    raise FileExistsError(f"{self._file} is in the way, and not of a job")
                continue
            if state != seen:
                has_beaten, changed, seen = seen is not None, now, state
            is_gone = owner.is_gone or owner.is_this_process
            if is_gone or (owner.is_gone is None and now - changed > SILENCE_S):
                self._replace(seen)
                break
            if (owner.is_gone is False or has_beaten) and now - begun > LOCAL_S:
                self._refuse(owner)
            if not is_printed:
                is_printed = True
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
        """Make the file with its content in it; whether there was none."""
        mine = self._file.with_name(f"{FILE}.{self._me.nonce}")
        try:
            mine.write_bytes(self._content())
            os.link(mine, self._file)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EPERM, errno.EMLINK}:
                raise
            try:  # no hard links: the content comes a moment after the name
                with open(self._file, "xb") as file:
                    file.write(self._content())
            except FileExistsError:
                return False
        finally:
            mine.unlink(missing_ok=True)
        return True

    def _replace(self, seen: tuple[bytes, int] | None) -> None:
        """Put our name in the place of one that is gone.

        Two jobs may do so at once. Both then look whose name is there; and the first to lose would
        find out at its next save, for nothing is published without `check_claim`.
        """
        if _read(self._file) == seen:
            mine = self._file.with_name(f"{FILE}.{self._me.nonce}")
            mine.write_bytes(self._content())
            mine.replace(self._file)
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
    return None if state is None else parse(state[0])


def parse(content: bytes) -> Owner | None:
    """Return the owner that a file names; None if it names none."""
    try:
        owner = Owner(**json.loads(content))
        is_owner = type(owner.pid) is int and all(
            isinstance(value, str) for key, value in asdict(owner).items() if key != "pid"
        )
    except (ValueError, TypeError, RecursionError):
        return None
    return owner if is_owner else None


def _read(file: Path) -> tuple[bytes, int] | None:
    """Its content and its time of change. It is opened for both: NFS then asks the server."""
    try:
        with open(file, "rb") as stream:
            return stream.read(), os.fstat(stream.fileno()).st_mtime_ns
    except OSError:
        return None


def _this_process(nonce: str) -> Owner:
    job = next((os.environ[name] for name in JOB_IDS if os.environ.get(name)), "")
    pid = os.getpid()
    return Owner(socket.gethostname(), this_machine(), pid, _started(pid), job, nonce)


def _started(pid: int) -> str:
    """When the process was started; "" if there is none, or only a zombie."""
    try:
        # after the name, which may hold anything: state, and from there the 20th is the start
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
