"""Seconds from process start to the end of the first step: debug model, eager.

What it is spent on is told by starting ever more of it, each a process of its own: the
interpreter, torch, our imports, and the job up to its first step, all on one rank; then the
launcher with two, which checks, tokenises (done before, so it only looks) and starts them. Medians
of several rounds, and the CPU time of all processes, which other load changes less.

    python benchmarks/startup.py --rounds 5
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"NGPU": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
IMPORTS = {
    "interpreter": "pass",
    "import torch": "import torch",
    "with collections": "import meshwright.train.main",
    "import meshwright": "from meshwright.system.modules import uncollected\n"
    "with uncollected(): import meshwright.train.main",  # as doors do
}


def seconds(*command: str) -> tuple[float, float]:
    """Wall time of a process, and CPU time of it and its children."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def main() -> None:
    """Print each stage and what it adds to the one before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    stages = (*IMPORTS, "first step", "launcher, 2 ranks")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in stages}
    for _ in range(rounds + 1):
        for name, code in IMPORTS.items():
            taken[name].append(seconds(sys.executable, "-c", code))
        with tempfile.TemporaryDirectory() as folder:
            config = ("--job.config_file", "train_configs/debug_model.toml")
            overrides = ("--job.dump_folder", folder, "--training.steps", "1")
            no_save = ("--checkpoint.enable", "false", "--validation.enable", "false")
            taken["first step"].append(
                seconds(sys.executable, "train.py", *config, *overrides, *no_save)
            )
            taken["launcher, 2 ranks"].append(seconds("./run_llama_train.sh", *overrides, *no_save))
    before = 0.0
    for name, values in taken.items():
        middle, cpu = (median(x) for x in zip(*values[1:], strict=True))  # the first warms caches
        print(f"{name:18} {middle:6.2f} s  (+{middle - before:.2f})   CPU time {cpu:.2f} s")
        before = middle


if __name__ == "__main__":
    main()
