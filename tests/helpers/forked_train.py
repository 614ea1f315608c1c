"""`meshwright experiment` whose runs are forks of a process that has imported torch.

A run of a few steps takes a second or two of a core so, where a `meshwright train` takes 12: its
check, its launcher and its ranks import torch, each for itself.
"""

import contextlib
import io
from pathlib import Path
from unittest import mock

from meshwright.commands.experiment import worker
from meshwright.commands.experiment.command import EXIT_OPEN
from meshwright.commands.experiment.registry import Arm
from meshwright.commands.experiment.spec import Values, as_word
from meshwright.commands.main import run
from tests.helpers.forked import ForkedRanks
from tests.helpers.jobs import ROOT, environment

LIMIT_S = 900
"""For a run on a busy machine."""


def experiment(*words: object) -> str:
    """Run `meshwright experiment` in this process, and return what it prints."""
    printed, own = io.StringIO(), mock.patch.object(worker.Worker, "_train", train)
    code: object = 0
    with own, contextlib.redirect_stdout(printed):
        try:
            run(["experiment", *map(str, words)])
        except SystemExit as end:
            code = end.code
    assert code in (0, EXIT_OPEN), code
    return printed.getvalue()


def train(self: worker.Worker, arm: Arm, folder: Path, settings: Values) -> int:
    """Run the ranks of a job in a dump folder, as `Worker._train` does; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = arm.keys | settings | {"job.dump_folder": str(folder)}
    keys |= {"checkpoint.enable": True, "checkpoint.folder": worker.CHECKPOINTS}
    config = self._document.file.parent / arm.config
    words = ["--job.config_file", config, *(f"--{k}={as_word(v)}" for k, v in keys.items())]
    variables = environment(OMP_NUM_THREADS=1, TORCHINDUCTOR_COMPILE_THREADS=1)
    done = ForkedRanks(arm.ranks, [ROOT / "train.py", *words], variables).wait(LIMIT_S)
    with open(folder / "console.log", "a") as console:
        console.write(done.stdout + done.stderr)
    return done.returncode
