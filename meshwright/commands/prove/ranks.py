"""Real ranks: processes that are started once and then run many functions."""

import faulthandler
import gc
import os
import re
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from meshwright.system.errors import first_line
from meshwright.system.machine import LOOPBACK
from meshwright.system.processes import die_with_parent, fork_server

IMPORTED_BY_RANKS = (
    "torch._dynamo",
    "meshwright.parallelisms.tensor_parallel",
    "meshwright.parallelisms.pipeline",
    "meshwright.checkpoint.reader",
    "meshwright.checkpoint.writer",
)
"""Modules that jobs import where they need them. Meshes need them all, and imported before the
fork they take no time of a rank."""


class RankError(RuntimeError):
    """A function failed on a rank.

    Args:
        message: a sentence.
        details: the traceback, or the stacks of threads.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        if details:
            self.add_note(details)


LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<")
"""In the paths of files that are neither Meshwright's nor the user's."""


class RankPool:
    """`world_size` ranks in one process group, that run functions sent to them.

    Args:
        modules: of the functions, imported before the ranks start.
        backend: "gloo" for CPUs; "nccl" for ranks with a GPU each.
        timeout_s: for a collective: a deadlock fails after that, not after half an hour.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: int = 60,
        modules: Sequence[str] = ("meshwright.commands.prove.measure",),
        backend: str = "gloo",
    ) -> None:
        # ranks fork from one process that imported torch, has no thread and computes nothing:
        # each would take 4 s of a core to import it by itself
        context = fork_server(*modules, *IMPORTED_BY_RANKS)
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, world_size, self._folder.name, timeout_s, backend, theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # else a rank that dies is never noticed

    def run(self, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Call `fn(*args)` on every rank; return each result. `fn` must be a module's own function.

        Raises:
            RankError: of the first rank to fail; the pool is then closed.
        """
        results: dict[int, Any] = {}
        for connection in self._connections:
            connection.send((fn, args))
        while len(results) < len(self._connections):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in results]
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                rank = self._connections.index(ready)
                try:
                    is_ok, results[rank] = ready.recv()
                except (EOFError, ConnectionResetError):  # the latter: it hasn't read its work
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode  # -6: SIGABRT, by an error in C++
                    stacks = _stacks_file(self._folder.name, rank)
                    text = stacks.read_text() if stacks.exists() else ""
                    is_ok, results[rank] = False, (f"its process ended (exit code {code})", text)
                if not is_ok:
                    self.close()
                    sentence, details = results[rank]
                    raise RankError(f"rank {rank}: {sentence}", details)
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End the ranks, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _share_one_gloo_thread() -> None:
    """Have all gloo groups of this process use one device.

    Each group makes its own device otherwise, whose thread wakes up a hundred times a second
    for as long as the process lives: the groups of a few meshes take a core from whoever works.
    torch has no public way to say so. Without the names it would raise here, and nothing is lost
    if this function goes.
    """
    own: Any = dist.ProcessGroupGloo
    # not the default device, for which gloo looks up the name of this machine
    device = own.create_device(interface=LOOPBACK)

    class OnSharedDevice(own):  # type: ignore[misc]
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object
        ) -> None:  # torch 2.14 says whether ranks may be exchanged as well: not here
            options = own._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]
    # of a job, whose groups keep the pool's: torch doesn't take the class for gloo's
    warnings.filterwarnings("ignore", "Set timeout is now only supported")


def _stacks_file(folder: str, rank: int) -> Path:
    """Where a rank that C++ ends writes the stacks of its threads."""
    return Path(folder, f"stacks.{rank}")


def _serve(
    rank: int, world_size: int, folder: str, timeout_s: int, backend: str, connection: Connection
) -> None:
    # the server of forks ends with the caller, and ignores Ctrl-C: a rank that waits for others
    # would outlive them
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    gc.freeze()  # or each full collection goes through all of torch's modules, for 0.3 s
    # torch.compile makes a tqdm bar, whose lock between processes outlives a rank that is killed
    tqdm.set_lock(threading.RLock())
    faulthandler.enable(_stacks_file(folder, rank).open("w"))
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        os.environ["LOCAL_RANK"] = str(rank)  # by which it picks its GPU
    _share_one_gloo_thread()
    # they meet at a file: a free port is a race
    url = f"file://{folder}/meet"
    dist.init_process_group(backend, url, timeout=timeout, world_size=world_size, rank=rank)
    while True:
        try:
            fn, args = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send((True, fn(*args)))
        except BaseException as error:
            connection.send((False, (_sentence(error), traceback.format_exc())))


def _sentence(error: BaseException) -> str:
    """Return the kind and the text of an error, and the last line outside of libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not LIBRARIES.search(frame.filename)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
