"""Measure `meshwright checkpoint merge`: its memory, and the loss of merged weights.

    python -m benchmarks.merge memory --megabytes 100
    python -m benchmarks.merge losses --seeds 0,1,2,3,4

memory: the peak of a merge of three checkpoints above the process before it, in tensors of the
largest size. losses: small jobs at a constant learning rate, the validation loss of their last
checkpoints, and of the mean of those. A job validates it by a first step that changes nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from meshwright.checkpoint import commit
from meshwright.checkpoint.find import Opened
from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.manifest import NO_JOB, read_manifest
from meshwright.checkpoint.merge import merge
from meshwright.checkpoint.writer import write
from meshwright.system.files import Place

ROOT = Path(__file__).parents[1]
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 176}
STEPS = (220, 240, 260, 280, 300)
"""Of the checkpoints that are merged; the last ends the job."""
JOB = (
    *(f"--model.args.{name}={value}" for name, value in SMALL.items()),
    *("--training.seq_len=128", "--training.global_batch_size=4", "--training.local_batch_size=4"),
    *("--lr_scheduler.decay_ratio=0", "--checkpoint.interval=20", "--checkpoint.keep_latest_k=0"),
    *("--validation.freq=20", "--metrics.enable_tensorboard=false"),
)
STILL = (
    *("--optimizer.lr=1e-30", "--optimizer.weight_decay=0", "--training.steps=1"),
    "--lr_scheduler.warmup_steps=0",
)


def memory(given: argparse.Namespace) -> None:
    """Print the peak of a merge."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for step in (1, 2, 3):
            tensors = {f"model.{i}": torch.randn(given.megabytes * 256, 1024) for i in range(3)}
            unfinished = commit.unfinished_folder(Path(folder), step)
            write(tensors, unfinished, NO_JOB | {"step": step}, None, None)
            paths.append(commit.step_folder(Path(folder), step))
        del tensors
        parts = [Opened(Place("benchmark", path), read_manifest(path)) for path in paths]
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        merge(
            parts,
            [0.5, 0.25, 0.25],
            read_saved_tensors(Place("", paths[0])),
            Path(folder, "merged"),
        )
        tensors_in_peak = (_status("VmHWM") - before) / given.megabytes
    print(f"{tensors_in_peak:.2f} tensors of {given.megabytes} MiB")


def _status(key: str) -> float:
    """Return a line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def validate(folder: Path, *words: str) -> dict[int, float]:
    """Train; return the validation loss by step."""
    config = ROOT / "train_configs/debug_model.toml"
    command = [sys.executable, "-m", "meshwright.train", "--job.config_file", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += [f"--job.dump_folder={folder}", *JOB, *words]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {at["step"]: at["validation/loss"] for at in found if "validation/loss" in at}


def losses(given: argparse.Namespace) -> None:
    """Print a table of the parts' losses and of the merged one, by seed."""
    print("| seed | losses of the parts | mean | best | merged |\n|---|---|---|---|---|")
    for seed in given.seeds.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            words = [f"--training.seed={seed}", f"--training.steps={STEPS[-1]}"]
            words.append(f"--optimizer.lr={given.lr}")
            of_step = validate(folder / "job", *words)
            parts = [of_step[step] for step in STEPS]
            steps, out = ",".join(map(str, STEPS)), folder / "merged"
            command = [sys.executable, "-m", "meshwright.commands.main", "checkpoint", "merge"]
            command += [str(folder / "job"), "--steps", steps, "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            start = f"--checkpoint.initial_load_path={out}"
            (merged,) = validate(
                folder / "again", f"--training.seed={seed}", start, *STILL
            ).values()
        all_parts = ", ".join(f"{loss:.4f}" for loss in parts)
        figures = f"{statistics.mean(parts):.4f} | {min(parts):.4f} | {merged:.4f}"
        print(f"| {seed} | {all_parts} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    of_memory = commands.add_parser("memory", help="peak of a merge, in tensors")
    of_memory.set_defaults(run=memory)
    of_memory.add_argument("--megabytes", type=int, default=100, help="of each of 3 tensors")
    of_losses = commands.add_parser("losses", help="of merged weights, and of their parts")
    of_losses.set_defaults(run=losses)
    of_losses.add_argument("--seeds", default="0,1,2,3,4")
    of_losses.add_argument("--lr", type=float, default=8e-3, help="so high that losses fluctuate")
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
