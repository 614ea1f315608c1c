"""The agreement of all ranks on when to stop: a signal, a file, the clock, or the end of data."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import only_warn
from meshwright.system.log import logger
from meshwright.system.processes import STOP_SIGNALS, Requests

STOP_FILE = "STOP"
"""In the dump folder: asks the job to stop, as a signal does."""

PROFILE_FILE = "PROFILE"
"""In the dump folder: asks the job for a trace of the next steps."""

LOOK_EVERY_S = 1.0
"""Files are looked for no more often; they may be on a file system that many share."""

NO_LIMIT = 2**62

VOTE_TIMEOUT = timedelta(hours=1)
"""Longer delays of a rank are found by the timeouts of training."""


@dataclass(frozen=True)
class Decision:
    """The agreement of the ranks, the same on each."""

    reason: str = ""
    """Why the ranks stop; "": nobody was asked to."""
    last_step: int = NO_LIMIT
    """The last step that every rank can take, as far as they know."""

    def is_last(self, step: int) -> bool:
        """Return whether the job ends with `step`."""
        return bool(self.reason) or step >= self.last_step


class StopAgreement:
    """The agreement of all ranks on when to stop: some may be asked to, or have no more data.

    `send` starts an all-reduce, and `receive` waits for its result. Collective: every rank calls
    both equally often. Once the ranks have decided to stop, both do nothing.

    Args:
        folder: where the stop file and the profile file may appear.
        max_run_s: seconds after `begun` at which the job is to stop; 0: none.
        requests: signals that this rank gets, and its launcher's.
        begun: by `time.monotonic`; None: now.
    """

    def __init__(
        self, folder: Path, max_run_s: int, requests: Requests, begun: float | None = None
    ) -> None:
        self._stop_file, self._max_run_s = folder / STOP_FILE, max_run_s
        self._profile_file = folder / PROFILE_FILE
        self._requests = requests
        self._reasons = (  # a rank sends the index of its reason; the highest wins
            "",
            f"job.max_run_seconds = {max_run_s} are over",
            f"{self._stop_file} is there",
            *(number.name for number in STOP_SIGNALS),
        )
        self.decision = Decision()
        self._error: Exception | None = None
        self._own_last_step, self._asked = NO_LIMIT, 0
        self._wants_trace = self._takes_trace = False
        self._look_at = time.monotonic()
        self._begun = self._look_at if begun is None else begun
        self.limit = VOTE_TIMEOUT
        """How long to wait for other ranks."""
        self.group = dist.new_group(backend="gloo", timeout=VOTE_TIMEOUT)
        # the reason; the last step, negative; whether a trace is wanted
        self._message = torch.zeros(3, dtype=torch.int64)
        self._work: dist.Work | None = None

    def fail(self, error: Exception, last_step: int) -> None:
        """Have the next `send` say that this rank can take no step after `last_step`."""
        if last_step >= self._own_last_step:
            return
        self._error, self._own_last_step = error, last_step
        if not isinstance(error, ConfigError | StorageError | OSError):
            logger.error("reading failed", exc_info=error)

    def failures(self, step: int) -> dict[int, Exception]:
        """By rank, why there can be no step after `step`; empty if there can. Collective."""
        if step < self.decision.last_step:
            return {}
        errors: list[Exception | None] = [None] * dist.get_world_size()
        mine = self._error if self._own_last_step <= step else None
        dist.all_gather_object(errors, None if mine is None else _as_plain(mine), self.group)
        return {rank: error for rank, error in enumerate(errors) if error is not None}

    def send(self) -> None:
        """Send this rank's part; waits for nothing."""
        if self.decision.reason:
            return
        self._look()
        if name := self._requests.name:
            self._asked = max(self._asked, self._reasons.index(name))
        self._message[0] = self._asked
        self._message[1] = -self._own_last_step
        self._message[2] = int(self._wants_trace)
        self._wants_trace = False
        self._work = dist.all_reduce(
            self._message, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def receive(self) -> Decision:
        """Wait for all ranks' parts; return their decision."""
        if self._work is not None:
            self._work.wait(self.limit)
            self._work = None
            reason, last_step, wants_trace = self._message.tolist()
            self.decision = Decision(self._reasons[reason], -last_step)
            self._takes_trace |= bool(wants_trace)
            self._requests.is_agreed = bool(reason)
        return self.decision

    def takes_trace(self) -> bool:
        """Return whether somebody asked for a trace, once; on all ranks at the same step."""
        takes, self._takes_trace = self._takes_trace, False
        return takes

    def clear_stop_file(self) -> None:
        """Remove the stop file, for it has had its effect."""
        if not _is_first_here():
            return
        with only_warn("%s has to be removed before the job can resume", STOP_FILE):
            self._stop_file.unlink(missing_ok=True)

    def _look(self) -> None:
        """Note requests to stop that aren't signals."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        if self._max_run_s and now - self._begun >= self._max_run_s:
            self._asked = max(self._asked, 1)
        if os.path.exists(self._stop_file):  # no, where a file system fails for a moment
            self._asked = max(self._asked, 2)
        if dist.get_rank() == 0:
            with suppress(OSError):  # it isn't there, or a file system fails for a moment
                self._profile_file.unlink()
                self._wants_trace = True


def _is_first_here() -> bool:
    """Nodes may not share the folder: one that was left on a disk would stop every start."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def remove_stop_file(folder: Path) -> None:
    """Remove a request that a job before this one has left: it ended by itself, or was killed."""
    if not _is_first_here():
        return
    path = folder / STOP_FILE
    with suppress(OSError):  # it isn't there; or it has its effect
        path.unlink()
        words = "removed %s, which is older than this job; touch the file again to stop the job"
        logger.warning(words, path)  # where nodes share the folder, any of them may be first


def _as_plain(error: Exception) -> Exception:
    """Return the error without its cause, and of a kind that can be sent."""
    if isinstance(error, ConfigError):
        return ConfigError(error.key, str(error))
    if isinstance(error, StorageError):
        return StorageError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
