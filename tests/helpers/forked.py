"""Scripts as processes of their own, that need not import torch: they fork from one that did."""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory


def run_forked(
    words: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *words], env=env, cwd="/", ...)` with captured output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.train"])
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = context.Process(target=_become, args=(list(words), dict(env), outputs))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout_s)
        texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess(list(words), process.exitcode, *texts)


def _become(words: list[str], env: dict[str, str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir("/")
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")
