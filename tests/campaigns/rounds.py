"""Plays rounds of a small game with docs/experiments.md's loop as it is printed.

    python -m tests.campaigns.rounds --rounds 20 --seed 1

Each round draws a change of the best arm so far, trains pairs, and keeps it or not by the verdict.
Runs are forks of a process that has imported torch, so that they take seconds. Prints a table, and
the longest run. With `--folder`, a game that was stopped goes on.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.commands.main import main as meshwright
from tests.helpers.forked_train import experiment

ROOT = Path(__file__).resolve().parents[2]
GAME = """
base = "game_cpu"
budget = {steps = 48}
ranks = 1
seeds = 5
metric = "validation/bits_per_byte"
margin = 0.001
[common]
"model.args.dim" = 64
"model.args.n_layers" = 2
"training.seq_len" = 64
"lr_scheduler.warmup_steps" = 8
"validation.num_samples" = 16
"""
COMMAND = f'#!/bin/sh\nexec {sys.executable} -m tests.campaigns.rounds -- "$@"\n'


def loop() -> str:
    """Return the page's loop."""
    page = (ROOT / "docs/experiments.md").read_text("utf-8")
    (code,) = re.findall(r"<!-- file: loop.py -->\n```python\n(.*?)```", page, re.DOTALL)
    return code


def play(folder: Path, code: str, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a loop in a folder, where `meshwright` is a command of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "loop.py").write_text(code)
    (folder / "meshwright").write_text(command)
    (folder / "meshwright").chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "loop.py", *words],
        cwd=folder,
        env=os.environ | path,
        stdout=subprocess.PIPE,
        text=True,
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    given, since = parser.parse_args(words), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "game.toml").write_text(GAME)
        done = play(folder, loop(), COMMAND, "game.toml", str(given.rounds), str(given.seed))
        assert done.returncode == 0, done.returncode
        print("| round | change | verdict | pairs | difference | best |\n|---|---|---|---|---|---|")
        for line in done.stdout.splitlines():
            name, change, verdict, *facts = line.split()
            pairs, mean, best = facts or ("", "", "")
            mean = mean if mean in ("", "None") else f"{float(mean):+.4f}"
            print(f"| {name} | `{change}` | {verdict} | {pairs} | {mean} | {best} |")
        text = (folder / "outputs/game/results.jsonl").read_text()
        runs = [json.loads(line) for line in text.splitlines()]
    longest = max(run["seconds"] for run in runs)
    minutes = (time.monotonic() - since) / 60
    print(f"{len(runs)} runs, the longest of {longest:.0f} s, in {minutes:.1f} min")


if __name__ == "__main__":
    if sys.argv[1:4] == ["--", "experiment", "run"]:
        print(experiment(*sys.argv[3:]), end="")
    elif sys.argv[1:2] == ["--"]:
        sys.argv[1:2] = []
        meshwright()
    else:
        main(sys.argv[1:])
