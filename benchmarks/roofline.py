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
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent / "contenders"))  # last: one is called transformers
from workload import Workload


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


def main() -> None:
    """Print each product, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=json.loads, nargs="?", default={})
    parser.add_argument("--only-products", action="store_true")
    args = parser.parse_args()
    work = Workload(**args.workload)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"device": device, "dtype": getattr(torch, work.dtype)}
    best = functools.partial(best_s, device=device)
    tokens = work.batch * work.seq_len
    total_s, flops = 0.0, 0
    for name, (inputs, outputs, times) in products(work).items():
        x, grad = torch.randn(tokens, inputs, **options), torch.randn(tokens, outputs, **options)
        weight = torch.randn(outputs, inputs, **options)
        forward = best(lambda x=x, w=weight: x @ w.T)
        to_input = best(lambda g=grad, w=weight: g @ w)
        to_weight = best(lambda x=x, g=grad: g.T @ x)
        each = 2 * tokens * inputs * outputs
        rates = " ".join(f"{each / s / 1e9:7.0f}" for s in (forward, to_input, to_weight))
        print(f"{name:8} {times:3} x  forward, to input, to weight: {rates} GFLOP/s")
        total_s += times * (forward + to_input + to_weight)
        flops += times * 3 * each
    result = {"products_flops_per_s": flops / total_s, "products_s": total_s}
    if not args.only_products:
        source = torch.randn(1 << 26, device=device)
        into = torch.empty_like(source)
        result["copy_bytes_per_s"] = 2 * source.nbytes / best_s(lambda: into.copy_(source), device)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
