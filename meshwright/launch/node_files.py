"""What the launchers of a job's nodes tell each other: a file per node in the shared folder.

A file's time says that its node is there. It stays empty until the job hangs; then it has the
evidence about the ranks of that node. Free of torch.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.system.errors import ConfigError
from meshwright.system.files import text_of, whole_file

LOOK_EVERY_S = 2.0

LOOK_AGAIN_S = 0.5

TELL_S = 10.0
"""Seconds that nodes get to write their evidence: two looks, the ranks' answers, a slow disk."""


class NodeFiles:
    """The file of this node, and those of the others, which a thread looks at.

    The first node looks at all others, and each other at the first: so all hear of a hang, and the
    file system isn't asked by every node about every other.

    Attributes:
        is_hang_found: whether a node has written evidence.
        silent_s: seconds in which the most silent node has told nothing.
        is_shared: whether any other node's file has been seen to change.

    Args:
        folder: returns the one that all nodes share. It's called in the thread, since the file
            system may be the cause of a hang.
        node: number of this one.
        nodes: of the job.
    """

    def __init__(self, folder: Callable[[], Path], node: int, nodes: int) -> None:
        self.is_hang_found, self.silent_s, self.is_shared = False, 0.0, False
        self._folder, self._node, self._nodes = folder, node, nodes
        self._paths: list[Path] = []
        self._at_start: list[int] = []
        self._times: dict[int, int] = {}
        self._silent_looks: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError, ConfigError):  # a file system may answer later
                self.look()
            self._ended.wait(LOOK_EVERY_S)

    def _open(self) -> None:
        folder = self._folder()
        paths = [folder / f"node_{node}.json" for node in range(self._nodes)]
        # a file of an earlier run may be there, of a hang: it counts once it has changed
        self._at_start = [_time(path) for path in paths]
        self._times = dict(enumerate(self._at_start))
        paths[self._node].write_bytes(b"")
        self._paths = paths

    def look(self) -> None:
        """Say that this node is here, and note what the others say.

        Raises:
            OSError: if the file system fails.
            ConfigError: if the folder isn't known.
        """
        if not self._paths:
            self._open()
        os.utime(self._paths[self._node])  # this works on a full disk as well
        for node in range(1, self._nodes) if self._node == 0 else [0]:
            path = self._paths[node]
            changed = _time(path)
            if changed == 0:  # its launcher has ended
                self._silent_looks.pop(node, None)
            elif changed != self._times[node]:
                self._silent_looks[node], self.is_shared = 0, True
                self.is_hang_found = self.is_hang_found or path.stat().st_size > 0
            elif node in self._silent_looks:  # one that has told nothing yet has no ranks
                self._silent_looks[node] += 1
            self._times[node] = changed
        self.silent_s = max(self._silent_looks.values(), default=0) * LOOK_EVERY_S

    def exchange(self, ranks: list[Any]) -> list[Any]:
        """Write what is known of the ranks here; return what all nodes have written in time.

        Raises:
            OSError: if the file system fails.
        """
        if not self._paths:
            return ranks
        with whole_file(self._paths[self._node], is_flushed=False) as file:
            file.write(json.dumps(ranks).encode())
        evidence = {self._node: ranks}
        end = time.monotonic() + TELL_S
        while len(evidence) < self._nodes and time.monotonic() < end:
            for node in set(range(self._nodes)) - set(evidence):
                path = self._paths[node]
                if _time(path) != self._at_start[node] and (text := text_of(path)):
                    evidence[node], self.is_shared = json.loads(text), True
            time.sleep(LOOK_AGAIN_S)
        return [rank for node in sorted(evidence) for rank in evidence[node]]

    def leave(self) -> None:
        """Remove the file of this node: the job has ended here, without a hang."""
        self._ended.set()
        for path in self._paths[self._node : self._node + 1]:
            path.unlink(missing_ok=True)


def _time(path: Path) -> int:
    """Return the time of a file's last change, in ns; 0 if there is none."""
    try:
        # NFS keeps attributes for up to a minute, but asks the server for those of an opened file
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0
