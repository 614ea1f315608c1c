"""The nodes of a job, while they wait for each other at torchrun's store."""

import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from meshwright.system import slurm

MEET_S = 1.0
"""Seconds that the store gets to answer while nodes meet: it is on one of them."""

ANSWER_S = 5.0
"""Seconds after which a store that says nothing is taken for another program."""

OTHER_PROGRAM = "a program listens there that does not answer as torchrun does"


class Meeting:
    """The nodes that have come, for the one who waits there.

    Each counts up its own number in the store, so a machine that has left is seen to be still.

    Args:
        endpoint: host:port of the store.
        machines: that have to come.
        name: of the job there.
    """

    def __init__(self, endpoint: str, machines: int, name: str) -> None:
        self._endpoint, self._machines, self._prefix = endpoint, machines, f"nodes of {name}"
        self._me = f"{socket.gethostname()}:{os.getpid()}"
        self._store: dist.Store | None = None
        self._counts: dict[str, int] = {}
        self._asking: threading.Thread | None = None
        self._why = ""

    def come(self) -> None:
        """Tell the others that this machine is here and waits."""
        try:
            if self._store is None and not self.is_silent:
                host, _, port = self._endpoint.rpartition(":")
                host = host.strip("[]")  # around an address of IPv6, which torchrun takes as well
                # torch would print a page of C++ where nobody listens
                socket.create_connection((host, int(port)), MEET_S).close()
                # a program that is no store may say nothing, and torch then waits for ever
                ask = partial(self._ask, host, int(port))
                self._asking = threading.Thread(target=ask, name="meeting", daemon=True)
                self._asking.start()
                self._asking.join(ANSWER_S)
            if self._store is not None:
                self._store.add(self._me, 1)
        except RuntimeError:  # it doesn't answer any more
            pass
        except OSError as error:  # nor yet
            self._why = f" ({error.strerror or error})"

    def _ask(self, host: str, port: int) -> None:
        with suppress(RuntimeError):
            timeout = timedelta(seconds=MEET_S)
            there = dist.TCPStore(
                host, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            store = dist.PrefixStore(self._prefix, there)
            store.set(f"node {store.add('count', 1)}", self._me)
            self._store = store

    @property
    def is_silent(self) -> bool:
        """Whether a program listens there, and gives no answer."""
        return self._asking is not None and self._asking.is_alive()

    def _here(self) -> list[str]:
        """Return the nodes that have counted since the last call, this one first."""
        if self._store is None:
            return []
        keys = [f"node {number}" for number in range(1, self._store.add("count", 0) + 1)]
        names = dict.fromkeys([self._me, *(self._store.get(key).decode() for key in keys)])
        before, self._counts = self._counts, {name: self._store.add(name, 0) for name in names}
        return [name for name in names if self._counts[name] != before.get(name, 0)]

    def describe(self) -> str:
        """Say where this node waits, which nodes have come, and which haven't."""
        try:
            here = [name.partition(":")[0] for name in self._here()]
        except RuntimeError:
            here, self._store = [], None
        if self.is_silent:
            return f"waiting at {self._endpoint}: {OTHER_PROGRAM}"
        if not here:
            return f"waiting at {self._endpoint}, where no node answers yet{self._why}"
        # one of the two may write the domain as well
        short = {name.partition(".")[0] for name in here}
        missing = [
            name for name in slurm.node_names(os.environ) if name.partition(".")[0] not in short
        ]
        rest = f"; missing: {', '.join(missing)}" if missing else ""
        came = f"{len(here)} of {self._machines} nodes are here ({', '.join(here)})"
        return f"waiting at {self._endpoint}: {came}{rest}"
