"""Updates of Muon on CPU ranks: each matrix by one owner, or all of them by every rank; and AdamW.

Updates alone, of the debug model with random gradients. "gather" is not in the package: every rank
gathers each matrix and computes it. All three in turns, in the same ranks.

    python -m benchmarks.muon --ranks 2 --rounds 5
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from meshwright.commands.prove.ranks import RankPool
from meshwright.config.training import Muon, Optimizer
from meshwright.models.families.llama import FLAVORS
from meshwright.parallelisms.shards import local_box
from meshwright.train.optim.matrices import MatrixOptimizer
from meshwright.train.optim.optimizers import SeveralOptimizers, build_optimizer, update

ARGS = FLAVORS["debugmodel"]
WAYS = ("AdamW", "gather", "owners")


class Gather:
    """In the place of `Exchange`: every rank gets every matrix."""

    def __init__(self, matrices: Sequence[DTensor]) -> None:
        self._matrices = matrices

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the whole of each matrix, by index."""
        found = {}
        for index, (part, matrix) in enumerate(zip(parts, self._matrices, strict=True)):
            shape, stride = matrix.shape, (matrix.shape[1], 1)
            spread = DTensor.from_local(
                part, matrix.device_mesh, matrix.placements, shape=shape, stride=stride
            )
            found[index] = spread.full_tensor()
        return found

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's part of every matrix."""
        parts = []
        for index, matrix in enumerate(self._matrices):
            mine, (first, _) = local_box(matrix)
            parts.append(wholes[index][first : first + len(mine)])
        return parts


def build(way: str, dtype: str) -> torch.optim.Optimizer:
    """Build the optimizer of parameters that are sharded over all ranks."""
    table = ARGS.table.parameters
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    parameters = {
        name: nn.Parameter(distribute_tensor(torch.randn(one.shape), mesh, [Shard(0)]))
        for name, one in table.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    config = Optimizer(name="AdamW" if way == "AdamW" else "muon", muon=Muon(dtype=dtype))
    optimizer = build_optimizer(parameters.items(), config, table, dist.group.WORLD)
    for part in optimizer._parts if isinstance(optimizer, SeveralOptimizers) else ():
        if isinstance(part, MatrixOptimizer) and way == "gather":
            part._exchange = Gather(part._trained)  # type: ignore[assignment]
    return optimizer


def measure(rounds: int, dtype: str) -> tuple[dict[str, float], bool]:
    """Median seconds of an update in each way, and whether both of Muon give the same bits."""
    optimizers = {way: build(way, dtype) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    go = torch.tensor(False)
    for number in range(rounds + 1):
        for way, optimizer in optimizers.items():
            dist.barrier()
            start = time.perf_counter()
            update(optimizer, go)
            dist.barrier()
            if number:  # the first makes the state
                seconds[way].append(time.perf_counter() - start)
    weights = [
        [p.to_local() for group in optimizers[way].param_groups for p in group["params"]]
        for way in ("gather", "owners")
    ]
    are_equal = all(map(torch.equal, *weights))
    return {way: median(times) for way, times in seconds.items()}, are_equal


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args()
    pool = RankPool(given.ranks)
    seconds, are_equal = pool.run(measure, given.rounds, given.dtype)[0]
    pool.close()
    for way, median_s in seconds.items():
        print(f"{way:8} {median_s * 1e3:8.1f} ms")
    print(f"owners and gather: {'the same bits' if are_equal else 'NOT the same bits'}")


if __name__ == "__main__":
    main()
