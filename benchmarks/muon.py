"""Measure Muon's update beside AdamW's on ranks that share every matrix (FSDP2).

    python -m benchmarks.muon --ranks 2 --dim 512 --layers 8 --rounds 3

"owners" is what jobs do: each matrix goes to one rank, which computes its update. "gather" is the
usual way: every rank gathers every matrix and computes every update. Cases run in turns. Seconds
are of the processor, the mean over ranks, since other programs may run. Bytes are those that a rank
sends to others for the update.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from meshwright.commands.prove.job import Job, open_source
from meshwright.commands.prove.ranks import RankPool
from meshwright.config.loader import load_config
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import build_meshes
from meshwright.train import trainer
from meshwright.train.optim import exchange, matrices
from meshwright.train.preflight import preflight

WARM_UP = 2
CASES = {"AdamW": "AdamW", "Muon, owners": "muon", "Muon, gather": "muon"}


class GatherEverywhere(exchange.Exchange):
    """Every rank has every matrix, and so every result."""

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """As the base's, of all matrices."""
        givers = [
            [exchange._first_copies(boxes, rank) for rank in range(self._size)]
            for boxes in self._boxes
        ]
        sent = [
            [part for i, part in enumerate(parts) if self._me in givers[i][rank]]
            for rank in range(self._size)
        ]
        from_rank = {
            rank: [i for i in range(len(parts)) if rank in givers[i][self._me]]
            for rank in range(self._size)
        }
        awaited = {r: [self._boxes[i][r][1] for i in found] for r, found in from_rank.items()}
        found = {i: parts[0].new_empty(shape) for i, shape in enumerate(self._shapes)}
        for rank, received in self._swap(sent, awaited, like=parts[0]).items():
            for index, part in zip(from_rank[rank], received, strict=True):
                exchange._part(found[index], self._boxes[index][rank]).copy_(part)
        return found

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Take the own part of every result."""
        return [exchange._part(wholes[i], b[self._me]) for i, b in enumerate(self._boxes)]


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

    kind = GatherEverywhere if case == "Muon, gather" else exchange.Exchange
    with (
        patch.object(trainer, "update", update),
        patch.object(matrices, "Exchange", kind),
        patch.object(exchange.dist, "all_to_all_single", swap),
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


def main() -> None:
    """Run all cases in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each round")
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
