"""Measure Muon beside AdamW: the cost of an update, and the loss at a grid of learning rates.

    python -m benchmarks.muon cost --ranks 2 --dim 512 --layers 8 --rounds 3
    python -m benchmarks.muon grid outputs/muon.jsonl

cost: on ranks that share every matrix (FSDP2). "owners" is what jobs do: each matrix goes to one
rank, which computes its update. "gather" is the usual way: every rank gathers every matrix and
computes every update. Cases run in turns. Seconds are of the processor, the mean over ranks, since
other programs may run. Bytes are those that a rank sends to others for the update.

grid: the debug preset from start to end, a process on one core for each optimizer, rate and seed.
The validation loss after the last step is added to the file when a run ends, so the same command
continues after a stop. The first seed tries all rates; the others begin with the best ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from meshwright.commands.prove.job import Job, open_source
from meshwright.commands.prove.ranks import RankPool
from meshwright.config.loader import load_config
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.shards import part_of_box
from meshwright.train import trainer
from meshwright.train.optim import matrices
from meshwright.train.preflight import preflight

WARM_UP = 2
CASES = {"AdamW": "AdamW", "Muon, owners": "muon", "Muon, gather": "muon"}


class GatherEverywhere(matrices.Exchange):
    """Every rank has every matrix, and so every result."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._owned = [*range(len(self._shapes))]
        moves = [
            matrices.Move(i, giver, owner, boxes[giver])
            for i, boxes in enumerate(self._boxes)
            for owner in boxes
            for giver in matrices.first_copies(boxes, owner)
        ]
        self._in = [move for move in moves if self._me in (move.sender, move.receiver)]

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Take the own part of every result."""
        return [part_of_box(wholes[i], boxes[self._me]) for i, boxes in enumerate(self._boxes)]


def measure(case: str, words: list[str], steps: int) -> tuple[float, float, int]:
    """Return processor seconds of a step and of its update, and the bytes that it sends. A rank's.

    Args:
        steps: measured, after `WARM_UP` others.
    """
    config = load_config([*words, f"--optimizer.name={CASES[case]}"])
    plan, seconds, sent = preflight(config, dist.get_world_size()), list[float](), list[int]()
    meshes = build_meshes(plan.dims, "cpu")
    real_update, real_swap = trainer.update, dist.all_to_all_single

    def update(*given: Any) -> None:
        start = time.process_time()
        real_update(*given)
        seconds.append(time.process_time() - start)

    def swap(into: Tensor, out: Tensor, in_: list[int], sizes: list[int], group: Any) -> None:
        others = sum(size for rank, size in enumerate(sizes) if rank != dist.get_rank(group))
        sent.append(others * out.element_size())
        real_swap(into, out, in_, sizes, group)

    kind = GatherEverywhere if case == "Muon, gather" else matrices.Exchange
    with (
        patch.object(trainer, "update", update),
        patch.object(matrices, "Exchange", kind),
        patch.object(matrices.dist, "all_to_all_single", swap),
    ):
        source = open_source(config.training, plan.model_args.vocab_size, 0)
        job = Job(plan, meshes, source)
        for stage in job.model.stages:
            initialize(stage, 0)
        whole = []
        for step in range(1, WARM_UP + steps + 1):
            start = time.process_time()
            job.step(step, {})
            whole.append(time.process_time() - start)
        job.close()
    return (
        statistics.median(whole[WARM_UP:]),
        statistics.median(seconds[WARM_UP:]),
        sum(sent) // (WARM_UP + steps),
    )


def cost(given: argparse.Namespace) -> None:
    """Run all cases in turns, and print a table."""
    shape = {"dim": given.dim, "n_layers": given.layers, "n_heads": 4, "n_kv_heads": 4}
    words = ["debug_model", "--training.seq_len=128", "--training.local_batch_size=1"]
    words += [f"--training.global_batch_size={given.ranks}"]
    words += [f"--parallelism.data_parallel_shard_degree={given.ranks}"]
    words += [f"--model.args.{name}={value}" for name, value in shape.items()]
    found: dict[str, list[tuple[float, float, int]]] = {case: [] for case in CASES}
    with closing(RankPool(given.ranks, 600)) as pool:
        for _ in range(given.rounds):
            for case, rounds in found.items():
                ranks = pool.run(measure, case, words, given.steps)
                step, update, sent = (
                    statistics.mean(column) for column in zip(*ranks, strict=True)
                )
                rounds.append((step, update, int(sent)))
    print("| case | step, CPU s per rank | update, CPU s per rank | bytes sent per rank |")
    print("|---|---|---|---|")
    for case, rounds in found.items():
        step, update, sent = map(statistics.median, zip(*rounds, strict=True))
        print(f"| {case} | {step:.3f} | {update:.4f} | {int(sent):,} |")


ROOT = Path(__file__).parents[1]
RATES = "5e-4,1e-3,2e-3,4e-3,8e-3"
PRESET = ("--validation.freq=1000", "--checkpoint.enable=false")
"""Without more than one validation, and without files beside the metrics."""
Run = tuple[str, str, str]
"""Optimizer, learning rate, seed."""


def train(run: Run, words: Sequence[str]) -> float:
    """Train the debug preset by itself on one core; return its last validation loss."""
    name, rate, seed = run
    keys = [f"--optimizer.name={name}", f"--optimizer.lr={rate}", f"--training.seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        config = ROOT / "train_configs/debug_model.toml"
        command = [sys.executable, "-m", "meshwright.train", "--job.config_file", str(config)]
        command += [f"--job.dump_folder={folder}", *PRESET, *keys, *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "metrics.jsonl").read_text("utf-8").splitlines()
    return float(json.loads(lines[-1])["validation/loss"])


def grid(given: argparse.Namespace) -> None:
    """Take the runs that `given.file` lacks, and print a table of all."""
    file: Path = given.file
    words = [f"--training.{name}_batch_size={given.batch}" for name in ("global", "local")]
    words += [f"--training.steps={given.steps}"]
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    kept = [json.loads(line) for line in lines]
    found: dict[Run, float] = {tuple(run): loss for run, of, loss in kept if of == words}
    rates = {"AdamW": given.adamw.split(","), "muon": given.muon.split(",")}

    def take(run: Run) -> None:
        found[run] = train(run, words)
        with file.open("a", encoding="utf-8") as results:
            results.write(json.dumps([run, words, found[run]]) + "\n")

    def losses(*of: str) -> list[float]:
        return [loss for run, loss in sorted(found.items()) if run[:2] == of]

    def mean(*of: str) -> float:
        return statistics.mean(losses(*of) or [float("inf")])

    for seed in given.seeds.split(","):
        best_first = [sorted(rates[name], key=lambda rate: mean(name, rate)) for name in rates]
        pairs = [zip(rates, pair, strict=True) for pair in zip_longest(*best_first)]
        runs = [(name, rate, seed) for pair in pairs for name, rate in pair if rate]
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(take, [run for run in runs if run not in found]))
    print("| optimizer | rate | mean | by seed |\n|---|---|---|---|")
    for name in rates:
        for rate in rates[name]:
            by_seed = ", ".join(f"{loss:.3f}" for loss in losses(name, rate))
            print(f"| {name} | {rate} | {mean(name, rate):.3f} | {by_seed} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    of_cost = commands.add_parser("cost", help="of an update, in processor seconds and bytes")
    of_cost.set_defaults(run=cost)
    of_cost.add_argument("--ranks", type=int, default=2)
    of_cost.add_argument("--dim", type=int, default=512)
    of_cost.add_argument("--layers", type=int, default=8)
    of_cost.add_argument("--rounds", type=int, default=3)
    of_cost.add_argument("--steps", type=int, default=4, help="of each round")
    of_grid = commands.add_parser("grid", help="validation losses at a grid of learning rates")
    of_grid.set_defaults(run=grid)
    of_grid.add_argument("file", type=Path, help="where losses are kept, a line for each run")
    of_grid.add_argument("--adamw", default=RATES, help="its learning rates")
    of_grid.add_argument("--muon", default=RATES)
    of_grid.add_argument("--seeds", default="0,1,2")
    of_grid.add_argument("--jobs", type=int, default=2, help="runs at a time")
    of_grid.add_argument("--batch", type=int, default=16, help="sequences per step")
    of_grid.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
