"""Scripts as processes of their own that import no torch: they fork from one that did."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["meshwright.train"])
        self._process = context.Process(
            target=_become, args=(self._words, dict(env), str(cwd), self._outputs)
        )
        self._process.start()

    def wait_for_line(self, line: str, timeout_s: float = 60) -> None:
        """Until it has written `line` to stdout."""
        end = time.monotonic() + timeout_s
        while line not in self._outputs[0].read_text().splitlines():
            assert self._process.is_alive(), self._outputs[1].read_text()
            assert time.monotonic() < end, f"no line {line!r} in {timeout_s} s"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Its exit code and output, as `subprocess.run` gives them."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._words, timeout_s)
        texts = [path.read_text() for path in self._outputs]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._words, self._process.exitcode, *texts)


def _become(words: list[str], env: dict[str, str], cwd: str, outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
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
