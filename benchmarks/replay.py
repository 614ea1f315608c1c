"""Seconds of `meshwright replay` for the steps behind a checkpoint, on one process.

python -m benchmarks.replay [--steps 20] [--repeats 3]

A small model trains on four ranks (FSDP2 2 x TP 2). The command takes the steps behind the first
checkpoint again, twice, since rounding is measured by a second replay. Imports are included.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median

MODEL = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128}
DEGREES = ("data_parallel_shard_degree", "tensor_parallel_degree")


def meshwright(*words: object) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> None:
    """Train, replay, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    keys: dict[str, object] = {f"model.args.{name}": size for name, size in MODEL.items()}
    keys |= {f"parallelism.{name}": 2 for name in DEGREES} | {
        "training.seq_len": 128,
        "training.local_batch_size": 4,
        "training.global_batch_size": 16,
        "training.steps": 2 * args.steps,
        "optimizer.lr": 3e-3,
        "checkpoint.interval": args.steps,
        "metrics.log_freq": 1,
        "metrics.grad_norm_by_group": "true",
        "validation.enable": "false",
        "compile.enable": "false",
    }
    wall, processor, result = list[float](), list[float](), {}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{key}={value}" for key, value in keys.items()]
        meshwright("train", "debug_model", "--ngpu=4", f"--job.dump_folder={folder}", *words)
        for _ in range(args.repeats):
            start, before = time.perf_counter(), _processor_s()
            result = json.loads(meshwright("replay", folder, "--step", 2 * args.steps, "--json"))
            wall.append(time.perf_counter() - start)
            processor.append(_processor_s() - before)
    taken = [(step["taken"], step["recorded"]) for step in result["steps"]]
    assert len(taken) == args.steps
    apart = (
        max(abs(ours[name] / theirs[name] - 1) for ours, theirs in taken)
        for name in ("loss", "grad_norm")
    )
    print("at most {:.1e} of the loss and {:.1e} of the gradient norm apart".format(*apart))
    print(f"{args.steps} steps: {median(processor):.1f} s of a processor, {median(wall):.1f} s")


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
