"""Predicted step times beside real ones, for jobs that no calibration has run.

    meshwright plan --calibrate RATES [--world-size N]
    python -m benchmarks.step_time RATES [--rounds 2]

Runs each job with `meshwright train` on as many ranks as RATES was measured with, so many times, in
turns, and prints its fastest and its median step. Compare the median: a calibration keeps the
middle one of its steps, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 14
LEFT_OUT = 4
"""First steps, which make memory and the optimizer's state."""
BASE = {
    "checkpoint.enable": "false",
    "validation.enable": "false",
    "metrics.log_freq": "1",
    "training.steps": str(STEPS),
}
JOBS = {
    "D 320, 6 layers, S 192 x 8, fp32": "320 6 5 5 192 8 1 float32 none 2048",
    "D 640, 3 layers, S 256 x 8, bf16, full": "640 3 10 10 256 8 1 bfloat16 full 2048",
    "D 448, 4 layers, S 512 x 4, fp32, selective": "448 4 7 7 512 4 1 float32 selective 2048",
    "D 896, 2 layers, S 1024 x 2, vocabulary 16k, bf16": "896 2 14 14 1024 2 1 bfloat16 none 16384",
    "D 256, 4 layers, 2 of 4 heads have keys, S 384 x 4, 3 microbatches, bf16": (
        "256 4 4 2 384 4 3 bfloat16 none 2048"
    ),
}
KEYS = (
    *("model.args.dim", "model.args.n_layers", "model.args.n_heads", "model.args.n_kv_heads"),
    *("training.seq_len", "training.local_batch_size", "training.global_batch_size"),
    *("training.mixed_precision_param", "activation_checkpoint.mode", "model.args.vocab_size"),
)


def words(job: str, ranks: int) -> list[str]:
    """Return the command line of a job."""
    values = dict(zip(KEYS, job.split(), strict=True))
    microbatches = int(values["training.global_batch_size"])
    batch = int(values["training.local_batch_size"]) * microbatches * ranks
    values["training.global_batch_size"] = str(batch)
    return [f"--{key}={value}" for key, value in (values | BASE).items()]


def meshwright(*arguments: str, **variables: str) -> str:
    """Run a command, and return what it prints."""
    command = [sys.executable, "-m", "meshwright.cli.main", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout


def real_steps(job: str, ranks: int) -> list[float]:
    """Run a job; return the seconds of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*words(job, ranks), f"--job.dump_folder={folder}"]
        meshwright("train", "train_configs/debug_model.toml", *options, NGPU=str(ranks))
        records = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["time/step_s"] for line in records][LEFT_OUT:]


def main() -> None:
    """Print a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rates", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    file = given.rates.absolute()
    ranks = json.loads(file.read_text())["ranks"]
    device = ["--device", "cpu", "--world-size", str(ranks), "--rates", str(file)]
    steps: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(given.rounds):
        for name, job in JOBS.items():
            steps[name] += real_steps(job, ranks)
    print("| job | predicted s | fastest | ratio | median | ratio |\n|---|---|---|---|---|---|")
    for name, job in JOBS.items():
        plan = ["plan", "train_configs/debug_model.toml", *device, "--json", *words(job, ranks)]
        predicted = json.loads(meshwright(*plan))["step_seconds"]
        fastest, median = min(steps[name]), statistics.median(steps[name])
        ratios = f"{fastest:.3f} | {predicted / fastest:.2f} | {median:.3f}"
        print(f"| {name} | {predicted:.3f} | {ratios} | {predicted / median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
