"""Predicted step times beside real ones, for jobs that no calibration has run.

    python -m benchmarks.step_time [--ranks 1] [--rounds 3]

In each round `meshwright plan --calibrate` measures this machine, the jobs are predicted from
that, and `meshwright train` runs each of them. A machine's speed may change within minutes, so only
ratios of one round count; the last column is their median. A calibration keeps the middle one of
its steps, so the jobs' median step is compared.
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
    "compile.enable": "false",  # as a plan
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
    command = [sys.executable, "-m", "meshwright.commands.main", *arguments]
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


def predicted_step(job: str, ranks: int, rates: Path) -> float:
    """Return the seconds of a job's step by a calibration."""
    device = ["--device", "cpu", "--world-size", str(ranks), "--rates", str(rates)]
    plan = ["plan", "train_configs/debug_model.toml", *device, "--json", *words(job, ranks)]
    return float(json.loads(meshwright(*plan))["step_seconds"])


def main() -> None:
    """Print a row for each job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in JOBS}
    with tempfile.TemporaryDirectory() as folder:
        rates = Path(folder) / "rates.json"
        for _ in range(given.rounds):
            meshwright("plan", "--calibrate", str(rates), f"--world-size={given.ranks}")
            for name, job in JOBS.items():
                predicted = predicted_step(job, given.ranks, rates)
                found[name].append((predicted, statistics.median(real_steps(job, given.ranks))))
    print("| job | predicted and real s, by round | ratio, median of rounds |\n|---|---|---|")
    for name, rounds in found.items():
        seconds = ", ".join(f"{predicted:.3f} {real:.3f}" for predicted, real in rounds)
        ratio = statistics.median(predicted / real for predicted, real in rounds)
        print(f"| {name} | {seconds} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
