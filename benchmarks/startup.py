"""Seconds from process start to the end of the first step: debug model, one rank, eager.

What it is spent on is told by starting ever more of it, each a process of its own: the
interpreter, torch, our imports, and the job up to its first step. Medians of several rounds.

    python benchmarks/startup.py --rounds 5
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "interpreter": "pass",
    "import torch": "import torch",
    "import meshwright": "import meshwright.train",
}


def seconds(*command: str) -> float:
    """Wall time of a process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print each stage and what it adds to the one before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[float]] = {name: [] for name in (*IMPORTS, "first step")}
    for _ in range(rounds + 1):
        for name, code in IMPORTS.items():
            taken[name].append(seconds(sys.executable, "-c", code))
        with tempfile.TemporaryDirectory() as folder:
            config = ("--job.config_file", "train_configs/debug_model.toml")
            overrides = ("--job.dump_folder", folder, "--training.steps", "1")
            no_save = ("--checkpoint.enable", "false")
            taken["first step"].append(
                seconds(sys.executable, "train.py", *config, *overrides, *no_save)
            )
    before = 0.0
    for name, values in taken.items():
        middle = median(values[1:])  # the first round warms the disk's cache
        print(f"{name:18} {middle:6.2f} s  (+{middle - before:.2f})")
        before = middle


if __name__ == "__main__":
    main()
