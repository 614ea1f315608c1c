"""Lets one job at a time use a folder of checkpoints: a file there names it. Free of torch.

Only the first rank of a job has to do with it. The file is `job.lock`.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from meshwright.system import claims, slurm
from meshwright.system.claims import Owner, State, read
from meshwright.system.errors import ConfigError
from meshwright.system.files import make_folder, only_warn
from meshwright.system.log import logger

FILE = "job.lock"

GRACE_S = 5.0
"""For so long a running job is waited for: it may be about to end."""

POLL_S = 0.25


class TakenOverError(OSError):
    """Another job writes to the folder by now."""


class Claim:
    """The right of this process to use the checkpoints in `folder`.

    Args:
        nonce: 12 hexadecimal digits, with which all names of its unfinished checkpoints begin.
    """

    def __init__(self, folder: Path, nonce: str) -> None:
        job = slurm.job_name(os.environ) or os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._folder, self._claim = folder, claims.Claim(folder / FILE, nonce, job)
        self._made = [folder]

    def take(self) -> None:
        """Become the folder's job; wait a little for another to end, or to prove gone. The folder
        is made, if need be.

        Raises:
            ConfigError: if another job runs.
            OSError: if the folder cannot be written, or something else has the file's name, or this
                user may not read it.
        """
        begun, file, me = time.monotonic(), self._claim.file, self._claim.owner
        above = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._made = above or [self._folder]
        make_folder(self._folder)
        seen: State | None = None
        has_beaten = False
        while not self._claim.take():
            state, is_late = read(file), time.monotonic() - begun > GRACE_S
            owner = None if state is None else state.owner
            if owner is None:  # between a job that ends and one that begins; or it is a user's
                # after a power cut it is empty, and is taken once it has been silent
                if is_late and file.read_text("utf-8", "replace").strip("\0"):
                    raise FileExistsError(f"{file} exists, and no job wrote it")
            elif owner.pid == me.pid and owner.is_here:  # an earlier job of this process
                file.unlink(missing_ok=True)
            elif state != seen:
                has_beaten, seen = seen is not None, state
                logger.info("waiting for %s, which uses %s", owner, self._folder)
            if has_beaten and is_late:
                self._refuse(owner)
            time.sleep(POLL_S)

    def give_back(self) -> None:
        """Let another job have the folder, and remove that if it is empty, as the folders made for
        it. Does nothing if it was not taken, or was taken over."""
        with only_warn("%s could not be removed", self._claim.file):
            if self._claim.give_back():
                with suppress(OSError):  # it holds checkpoints
                    for folder in self._made:
                        folder.rmdir()

    def _refuse(self, owner: Owner | None) -> None:
        raise ConfigError(
            "job.dump_folder",
            f"job.dump_folder: another job uses {self._folder}: "
            f"{owner or 'unknown'}\n  fix: wait until it has ended, or use another "
            f"job.dump_folder; if you know that it has ended, remove {self._claim.file}",
        )


def new_nonce() -> str:
    """12 hexadecimal digits that no other job has."""
    return secrets.token_hex(6)


def check_claim(folder: Path, nonce: str) -> None:
    """Raise `TakenOverError` if a job that runs, and is not the one with `nonce`, has claimed
    `folder`. There may be no claim (the disk was full), or a killed job's."""
    owner = holder(folder)
    if owner is not None and not (nonce.startswith(owner.nonce) or owner.is_gone):
        raise TakenOverError(f"another job uses {folder} now: {owner}")


def holder(folder: Path) -> Owner | None:
    """Return the job that has claimed `folder`, if there is one that can be read."""
    state = read(folder / FILE)
    return None if state is None else state.owner
