"""Scripts as processes of their own that import no torch: they fork from one that did."""

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from meshwright.commands.prove.ranks import IMPORTED_BY_RANKS
from meshwright.system.machine import GLOO, LOOPBACK
from meshwright.system.processes import fork_server


class Forked:
    """A script that runs, with its output in files.

    Args:
        words: the script and its arguments, as after `python`.
        env: its whole environment.
    """

    def __init__(self, words: Sequence[object], env: Mapping[str, str], cwd: str | Path = "/"):
        self._words = [str(word) for word in words]
        self._folder = TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        self.process = fork_server("meshwright.train.job", *IMPORTED_BY_RANKS).Process(
            target=_become, args=(self._words, dict(env), str(cwd), self._outputs)
        )
        self.process.start()

    def wait_for_line(self, line: str, timeout_s: float = 60) -> None:
        """Until it has written `line` to stdout."""
        end = time.monotonic() + timeout_s
        while line not in self._outputs[0].read_text().splitlines():
            assert self.process.is_alive(), self._outputs[1].read_text()
            assert time.monotonic() < end, f"no line {line!r} in {timeout_s} s"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Its exit code and output, as `subprocess.run` gives them."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise subprocess.TimeoutExpired(self._words, timeout_s)
        texts = [path.read_text() for path in self._outputs]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._words, self.process.exitcode, *texts)


class ForkedRanks:
    """A script on ranks that meet as torchrun's do, without torchrun.

    Args:
        words, env: as of `Forked`.
    """

    def __init__(self, num_ranks: int, words: Sequence[object], env: Mapping[str, str]):
        # the ranks are clients of a store in this process: a port to be free later is a race
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            GLOO: LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self.ranks = [
            Forked(words, {**env, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]

    def wait(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """The first rank's output, and the exit code of whichever rank was the first to fail: the
        others are then ended."""
        code, end = 0, time.monotonic() + timeout_s
        running = {rank.process.sentinel: rank for rank in self.ranks}
        while running and not code:
            ready = wait(running, end - time.monotonic())
            if not ready:
                break
            # of several, a lower rank's comes first
            code = next((c for c in (running.pop(s).process.exitcode for s in ready) if c), 0)
        for rank in running.values():
            rank.process.kill()  # it may have ended in the meantime, which `kill` allows
        done = [rank.wait() for rank in self.ranks]
        assert code or not running, f"not over in {timeout_s} s: {done[0].stdout}"
        return subprocess.CompletedProcess(done[0].args, code, done[0].stdout, done[0].stderr)


def _become(words: list[str], env: dict[str, str], cwd: str, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores it
    gc.freeze()  # full collections leave alone what was imported before
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if threads := env.get("OMP_NUM_THREADS"):
        # OpenMP read it in the server. More threads than cores spin: steps take seconds
        torch.set_num_threads(int(threads))
    sys.argv[:] = words
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # multiprocessing would first join threads that the script has left
