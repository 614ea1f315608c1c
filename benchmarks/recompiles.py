"""Graphs that torch.compile makes in the first step of a job, and in all that follow.

A row per mesh, a column per mode of activation checkpointing; each cell is a job of the trainer on
its own: a Llama of 4 layers, two microbatches a step, a checkpoint every fifth. What is compiled
after the first step costs seconds in the middle of a run; it should be 0.

    python benchmarks/recompiles.py --steps 50 --backend inductor
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torch._dynamo.utils import counters

from meshwright.config.loader import load_config
from meshwright.metrics.records import Record
from meshwright.train.job import run
from meshwright.train.preflight import preflight

TOKENIZER = Path(__file__).parents[1] / "assets/tokenizers/python_2k.model"
JOB = {
    "model.args": "{dim = 64, n_layers = 4, n_heads = 4, n_kv_heads = 2, hidden_dim = 128}",
    "model.tokenizer_path": TOKENIZER,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.mixed_precision_param": "float32",
    "compile.enable": "true",
    "checkpoint.enable": "true",
    "checkpoint.interval": 5,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
}
MESHES = {  # degrees, and ranks that read different samples
    "FSDP2": ({"data_parallel_shard_degree": 2}, 2),
    "HSDP": ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}, 4),
    "FSDP2 x TP": ({"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, 2),
    "CP": ({"data_parallel_shard_degree": 1, "context_parallel_degree": 2}, 1),
    "PP 1F1B": ({"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}, 1),
}
RANKS = {"FSDP2": 2, "HSDP": 4, "FSDP2 x TP": 4, "CP": 2, "PP 1F1B": 2}
MODES = ("none", "selective", "full", "memory_budget")


class CountGraphs:
    """A metrics sink: notes after each step how many graphs have been compiled up to then."""

    def __init__(self) -> None:
        self.total: list[int] = []

    def write(self, record: Record) -> None:
        """Take the count of a step that has just been taken."""
        self.total.append(counters["stats"]["unique_graphs"])

    def close(self) -> None:
        """Write the counts where the table finds them."""
        folder = Path(os.environ["COUNTS"])
        (folder / f"counts_{os.environ['RANK']}.json").write_text(json.dumps(self.total))


def cell(mesh: str, mode: str, steps: int, backend: str) -> str:
    """Graphs of the first step + graphs of all others, of the rank with most."""
    degrees, dp = MESHES[mesh]
    keys = JOB | {f"parallelism.{name}": degree for name, degree in degrees.items()}
    keys |= {"training.steps": steps, "training.global_batch_size": 2 * 2 * dp}
    keys |= {"activation_checkpoint.mode": mode, "compile.backend": backend}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[mesh])]
    with tempfile.TemporaryDirectory() as folder:
        keys |= {"job.dump_folder": f"{folder}/out"}
        job = subprocess.run(
            [sys.executable, *torchrun, __file__, "--job"]
            + [f"--{key}={value}" for key, value in keys.items()],
            env=os.environ | {"COUNTS": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        found = [json.loads(path.read_text()) for path in Path(folder).glob("counts_*.json")]
    if job.returncode or len(found) != RANKS[mesh]:
        return "refused" if "cannot compile" in job.stderr else f"failed\n{job.stderr[-3000:]}"
    first, later = max((counts[0], counts[-1] - counts[0]) for counts in found)
    return f"{first} + {later}"


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    print("| mesh |", " | ".join(MODES), "|")
    print("|---" * (1 + len(MODES)) + "|")
    for mesh in MESHES:
        cells = [cell(mesh, mode, args.steps, args.backend) for mode in MODES]
        print("|", mesh, "|", " | ".join(cells), "|", flush=True)


def job(overrides: list[str]) -> None:
    """One rank of one job."""
    config = load_config(overrides)
    run(preflight(config, int(os.environ["WORLD_SIZE"])), extra_sinks=[CountGraphs()])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2:])
    else:
        main()
