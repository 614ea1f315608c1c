"""A step of fused AdamW over many small sharded parameters: of DTensors, and of this rank's shards.

python benchmarks/optimizer_shards.py --parameters 288
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.config.training import Optimizer
from meshwright.train.optim.optimizers import build_optimizer, update


def main() -> None:
    """Print the first step's time, and the median of later ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=288)
    count = parser.parse_args().parameters
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    go = torch.tensor(False)
    for name, is_ours in (("DTensors", False), ("shards", True)):
        parameters = [
            nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
            for _ in range(count)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters)]
        optimizer = build_optimizer(named, Optimizer())
        step: Callable[[], object] = optimizer.step
        if is_ours:
            step = lambda optimizer=optimizer: update(optimizer, go)  # noqa: E731
        seconds = []
        for _ in range(20):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        first, later = 1e3 * seconds[0], 1e3 * median(seconds[1:])
        print(f"{count} parameters as {name}: first {first:.0f} ms, later {later:.2f} ms")


if __name__ == "__main__":
    main()
