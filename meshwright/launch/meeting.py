"""Which machines of a job have come to the place where they meet, for the one who waits there."""

import os
import socket
import subprocess
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

ANSWER_S = 1.0
"""Seconds that the store of torchrun gets to answer: it is on one of the machines."""

SCONTROL_S = 5.0


class Meeting:
    """The machines that have come, as they tell each other in torchrun's store.

    Each counts up a number of its own there, so a machine that has left is seen to be still.

    Args:
        endpoint: host:port of the store.
        machines: that have to come.
        name: of the job there.

    Attributes:
        said: how often `describe` was called.
    """

    def __init__(self, endpoint: str, machines: int, name: str) -> None:
        self._endpoint, self._machines, self._prefix = endpoint, machines, f"machines of {name}"
        self._me = f"{socket.gethostname()}:{os.getpid()}"
        self._store: dist.Store | None = None
        self._counts: dict[str, int] = {}
        self.said = 0

    def come(self) -> None:
        """Tell the others that this machine is here and waits."""
        with suppress(RuntimeError, OSError):  # it does not answer, yet or any more
            if self._store is None:
                host, _, port = self._endpoint.rpartition(":")
                # torch would print a page of C++ where nobody listens
                socket.create_connection((host, int(port)), ANSWER_S).close()
                store = dist.TCPStore(
                    *(host, int(port)),
                    is_master=False,
                    timeout=timedelta(seconds=ANSWER_S),
                    wait_for_workers=False,
                )
                self._store = dist.PrefixStore(self._prefix, store)
                self._store.set(f"machine {self._store.add('count', 1)}", self._me)
            self._store.add(self._me, 1)

    def _here(self) -> list[str]:
        """Return the machines that have counted since the last call, this one first."""
        if self._store is None:
            return []
        told = [f"machine {number}" for number in range(1, self._store.add("count", 0) + 1)]
        names = dict.fromkeys([self._me, *(self._store.get(key).decode() for key in told)])
        counts = {name: self._store.add(name, 0) for name in names}
        before, self._counts = self._counts, counts
        return [name for name in names if counts[name] != before.get(name, 0)]

    def describe(self) -> str:
        """Say where this machine waits, which machines have come, and which have not."""
        self.said += 1
        try:
            here = [name.partition(":")[0] for name in self._here()]
        except RuntimeError:
            here, self._store = [], None
        if not here:
            return f"waiting at {self._endpoint}, where no machine answers yet"
        # one of the two may write the domain, too
        short = {name.partition(".")[0] for name in here}
        missing = [name for name in _of_slurm() if name.partition(".")[0] not in short]
        rest = f"; missing: {', '.join(missing)}" if missing else ""
        came = f"{len(here)} of {self._machines} machines are here ({', '.join(here)})"
        return f"waiting at {self._endpoint}: {came}{rest}"


def _of_slurm() -> list[str]:
    """Return the names of the machines that Slurm has given this job; none without Slurm."""
    if not (names := os.environ.get("SLURM_JOB_NODELIST")):
        return []
    command = ["scontrol", "show", "hostnames", names]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.split()
