"""What an experiment costs beside its runs: processor time of the worker per run, and of `show`.

python -m benchmarks.experiments --arms 25

No run trains: each writes its metrics as a run of 240 steps does, with 12 validations.
"""

import argparse
import contextlib
import io
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

from meshwright.commands.experiment.registry import Arm
from meshwright.commands.experiment.spec import Values
from meshwright.commands.experiment.worker import Worker
from meshwright.commands.main import run

SEEDS, STEPS = 8, 240

EXPERIMENT = """
base = "debug_model"
budget = {{steps = {}}}
ranks = 1
seeds = {}
margin = 1e-9
[list]
"optimizer.lr" = {}
"""

ENDS = list[tuple[float, float]]()
"""Processor seconds at the start and the end of each run."""


def train(arm: Arm, folder: Path, settings: Values) -> int:
    """Write what a run writes, with losses that decide no arm."""
    start = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(str(folder))
    rows = []
    for step in range(1, STEPS + 1):
        row = {"step": step, "loss/train": 3.0, "data/tokens": step}
        if step % settings["validation.freq"] == 0:
            row["validation/loss"] = noise.gauss(3, 0.1)
        rows.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    history = [
        {"event": "start", "step": 0, "unix_s": 0},
        {"event": "end", "step": STEPS, "unix_s": 0, "reason": "finished"},
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in history))
    ENDS.append((start, time.process_time()))
    return 0


def main() -> None:
    """Fill an experiment with runs, and show it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", type=int, default=25, help="the base included")
    rates = [1e-3 + 1e-5 * number for number in range(1, parser.parse_args().arms)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lab.toml")
        file.write_text(EXPERIMENT.format(STEPS, SEEDS, rates))
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        own = mock.patch.object(Worker, "_train", staticmethod(train))
        with quiet[0], quiet[1], own, contextlib.suppress(SystemExit):
            run(["experiment", "run", str(file), "--json"])
        between = [after[0] - before[1] for before, after in pairwise(ENDS)]
        words = [sys.executable, "-m", "meshwright", "experiment", "show", str(file)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(ENDS)} runs: {sum(between) / len(between):.3f} s for each,")
    print(f"of the last {SEEDS}: {sum(between[-SEEDS:]) / SEEDS:.3f} s")
    print(f"show: {used.ru_utime + used.ru_stime:.2f} s")


if __name__ == "__main__":
    main()
