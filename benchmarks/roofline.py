"""Limits of this machine for one Llama: FLOP/s of its own matrix products, and memory bandwidth.

Each product is timed alone, forward and both of backward; their FLOPs over the sum of their best
times is the limit that MFU is measured against. Attention's products are not among them: no kernel
of torch computes them alone.

    python benchmarks/roofline.py                          (bf16; the workload of throughput.py)
    python benchmarks/roofline.py '{"dtype": "float32", "vocab": 131072}'
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent / "contenders"))  # last: one is called transformers
from workload import Workload

WAYS = ("forward", "to input", "to weight")
"""The products of a projection in a step."""


def best_s(function: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of at least 5 runs in 0.3 s."""
    seconds: list[float] = []
    while len(seconds) < 5 or sum(seconds) < 0.3:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def products(work: Workload) -> dict[str, tuple[int, int, int]]:
    """Return (inputs, outputs, times per step) of each kind of projection."""
    kv = work.dim * work.n_kv_heads // work.n_heads
    return {
        "wq, wo": (work.dim, work.dim, 2 * work.n_layers),
        "wk, wv": (work.dim, kv, 2 * work.n_layers),
        "w1, w3": (work.dim, work.hidden_dim, 2 * work.n_layers),
        "w2": (work.hidden_dim, work.dim, work.n_layers),
        "output": (work.dim, work.vocab, 1),
    }


def timed(work: Workload, device: torch.device) -> Iterator[tuple[str, int, int, list[float]]]:
    """Yield of each kind of projection: name, times per step, FLOPs of a product, and the seconds
    of forward, to input and to weight."""
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, work.dtype)}
    tokens = work.batch * work.seq_len
    for name, (inputs, outputs, times) in products(work).items():
        x, grad = torch.randn(tokens, inputs, **options), torch.randn(tokens, outputs, **options)
        w = torch.randn(outputs, inputs, **options)
        pairs = ((x, w.T), (grad, w), (grad.T, x))
        seconds = [best_s(functools.partial(torch.matmul, *pair), device) for pair in pairs]
        yield name, times, 2 * tokens * inputs * outputs, seconds


def main() -> None:
    """Print each product, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=json.loads, nargs="?", default={})
    parser.add_argument("--only-products", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total_s, flops = 0.0, 0
    for name, times, each, seconds in timed(Workload(**args.workload), device):
        rates = " ".join(f"{each / s / 1e9:7.0f}" for s in seconds)
        print(f"{name:8} {times:3} x  {', '.join(WAYS)}: {rates} GFLOP/s")
        total_s += times * sum(seconds)
        flops += times * 3 * each
    result = {"products_flops_per_s": flops / total_s, "products_s": total_s}
    if not args.only_products:
        source = torch.randn(1 << 26, device=device)
        into = torch.empty_like(source)
        result["copy_bytes_per_s"] = 2 * source.nbytes / best_s(lambda: into.copy_(source), device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
