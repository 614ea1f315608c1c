"""A process that writes what a rank has staged, so that the rank's interpreter does not.

    python -m meshwright.checkpoint.write_process CONNECTION MEMORY PARENT     (started by us)

It knows nothing of other ranks, and publishes nothing: if the rank dies, so does it, and what it
wrote is ignored.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.staging import StagedPlanner, Staging, open_memory
from meshwright.checkpoint.writer import CommittingWriter
from meshwright.supervise import die_with_parent


class WriteProcess:
    """The process, as the rank sees it. It dies with the thread that starts it."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None

    def start(self) -> None:
        """Start it, unless it runs; it needs seconds to import torch, for which no one waits."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = Pipe()
        descriptors = theirs.fileno(), self._staging.descriptor
        numbers = *descriptors, os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.checkpoint.write_process", *map(str, numbers)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            # it finds what we find, and takes no memory on a GPU
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self._connection = ours

    def write(self, folder: Path, step: int, plan: SavePlan) -> list[WriteResult]:
        """Have it write this rank's part of a checkpoint.

        Raises:
            ChildProcessError: if it is killed.
            OSError: if it cannot write.
        """
        self.start()
        assert self._process is not None
        assert self._connection is not None
        staging = self._staging
        try:
            self._connection.send((folder, step, plan, staging.layout, staging.num_bytes))
            result = self._connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise ChildProcessError(f"the process that writes ended with {code}") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()


class RemoteWriter(CommittingWriter):
    """Has the process write this rank's part."""

    def __init__(
        self, folder: Path, step: int, manifest: Mapping[str, Any], process: WriteProcess
    ) -> None:
        super().__init__(folder, step, manifest, is_staged=True)
        self._process = process

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Wait for what the process has written."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._process.write(self._folder, self._step, plan))
        return written


def _serve(connection: "Connection[Any, Any]", descriptor: int) -> None:
    memory, num_bytes = None, -1
    while True:
        try:
            folder, step, plan, layout, needed = connection.recv()
        except EOFError:
            return
        result: object
        try:
            if memory is None or needed != num_bytes:
                memory, num_bytes = open_memory(descriptor, needed), needed
            copies = {name: place.tensor(memory) for name, place in layout.items()}
            writer = CommittingWriter(folder, step, {}, is_staged=True)
            result = writer.write_data(plan, StagedPlanner(copies)).value()
        except Exception as error:
            result = error
        connection.send(result)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # meant for the rank, which ends us
        signal.signal(number, signal.SIG_IGN)
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
