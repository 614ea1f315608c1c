"""Clipping of gradients on a mesh of two axes: shard by shard, and by torch on DTensors.

Four gloo ranks, dp_shard 2 x tp 2, with as many small gradients as a model of so many layers has.
The first call is what a job's first step pays, the others what each later one does.

    python benchmarks/clipping.py --layers 32
"""

import argparse
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_

from meshwright.parallelisms.gradients import clip_gradients
from meshwright.proof.ranks import RankPool

PER_LAYER, CALLS = 9, 5


def measure(layers: int) -> dict[str, list[float]]:
    """Seconds of each call."""
    mesh = init_device_mesh("cpu", (2, 2))
    times: dict[str, list[float]] = {}
    for name, clip in (("shards", clip_gradients), ("DTensors", clip_grads_with_norm_)):
        parameters = []
        for index in range(layers * PER_LAYER):
            placements = [Shard(0), Shard(index % 2)]
            whole = torch.ones(8, 8)
            parameter = nn.Parameter(distribute_tensor(whole, mesh, placements))
            parameter.grad = distribute_tensor(whole, mesh, placements)
            parameters.append(parameter)
        norm, times[name] = torch.tensor(8.0 * len(parameters) ** 0.5), []
        for _ in range(CALLS):
            start = time.perf_counter()
            clip(parameters, 1.0, norm)
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    pool = RankPool(4)
    times, *_ = pool.run(measure, options.layers)
    pool.close()
    for name, (first, *later) in times.items():
        print(f"{name:9} first {1e3 * first:8.1f} ms, later {1e3 * min(later):6.1f} ms")


if __name__ == "__main__":
    main()
