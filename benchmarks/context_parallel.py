"""Gathered keys and values against ring attention: time and memory of one layer's attention.

gloo ranks on this machine, a forward and a backward each; what a layer keeps for its backward is
counted in bytes, each storage once. On CPUs time says what kernels and merging cost, not what a
network does.

    python benchmarks/context_parallel.py --cp 2 --seq-len 4096
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from meshwright.parallelisms.context_parallel import attend, local_positions
from meshwright.proof.ranks import RankPool

ROUNDS = 7
BATCH, HEAD_DIM = 1, 64


def kept(attention: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Bytes that a forward keeps for its backward."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = attention(*inputs)
    del output
    return sum(storages.values())


def seconds(attention: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Of a forward and a backward, the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    attention(*inputs).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def measure(cp: int, seq_len: int, heads: int, kv_heads: int) -> dict[str, tuple[float, int]]:
    """(median seconds, bytes kept) of each way, in turns."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (cp,))
    length = len(local_positions(seq_len, mesh, torch.device("cpu")))
    inputs = [
        torch.randn(BATCH, n, length, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    ring = mesh.get_group().group_name
    ways = {
        "gather": functools.partial(attend, mesh=mesh, ring=None),
        "ring": functools.partial(attend, mesh=mesh, ring=ring),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            times[name].append(seconds(way, inputs))
    return {name: (statistics.median(times[name][1:]), kept(ways[name], inputs)) for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    options = parser.parse_args()
    pool = RankPool(options.cp)
    sizes = (options.seq_len, options.heads, options.kv_heads)
    result, *_ = pool.run(measure, options.cp, *sizes)
    pool.close()
    for name, (duration, num_bytes) in result.items():
        print(f"{name:7} {1e3 * duration:8.1f} ms  {num_bytes / 2**20:8.2f} MiB kept for backward")


if __name__ == "__main__":
    main()
