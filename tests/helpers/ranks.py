"""Real gloo ranks for tests: processes that are started once a session and world size.

Starting one takes seconds, nearly all of them `import torch`; a test takes milliseconds.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # a deadlock fails in a minute, not in half an hour


class RankPool:
    """`world_size` CPU ranks in one process group, that run functions sent to them."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        # the ranks meet at a file: a free port is a race
        url = f"file://{self._folder.name}/meet"
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, url, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, fn: Callable[..., Any], *args: object) -> list[Any]:
        """`fn(*args)` on every rank; what each returned. `fn` must be a module's own function.

        Raises:
            AssertionError: with the traceback of the first rank to fail; the pool is then closed.
        """
        for connection in self._connections:
            connection.send((fn, args))
        results = [connection.recv() for connection in self._connections]
        for rank, (is_ok, value) in enumerate(results):
            if not is_ok:
                self.close()
                raise AssertionError(f"rank {rank}:\n{value}")
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, url: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", url, timeout=COLLECTIVE_TIMEOUT, world_size=world_size, rank=rank
    )
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send((True, fn(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def tree(folder: Path) -> set[str]:
    """Every path below `folder`, for "nothing was written"."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
