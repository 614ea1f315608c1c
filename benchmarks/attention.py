"""Causal attention on this CPU: torch's, and the kernel of cpu_kernels.

Forward and backward of one layer: medians, in turns; and errors of the output and of the gradients
against fp64, relative to their size.

    python benchmarks/attention.py
    python benchmarks/attention.py --dtype float32
    python benchmarks/attention.py --sizes 1x8192 --heads 32 --kv-heads 8 --head-dim 128
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.parallelisms.cpu_kernels import attention


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the model calls it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the kernel."""
    return attention.attend(q, k, v, scale=q.shape[-1] ** -0.5)


def timed(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], leaves: list[Tensor], grad: Tensor
) -> tuple[float, float, list[Tensor]]:
    """Return milliseconds of forward and of backward, the output and the gradients."""
    start = time.perf_counter()
    out = way(*leaves)
    middle = time.perf_counter()
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle), found


def main() -> None:
    """Print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = ["4x512", "2x1024", "1x2048", "1x8192"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="sequences x tokens")
    for flag, default in (("heads", 8), ("kv-heads", 4), ("head-dim", 64), ("repeats", 12)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    start = time.perf_counter()
    if reason := attention.why_not(args.head_dim, dtype):
        raise SystemExit(f"no kernel: {reason}")
    print(f"kernel loaded, or compiled if it was not yet: {time.perf_counter() - start:.1f} s")
    torch.manual_seed(0)
    for size in args.sizes:
        batch, length = map(int, size.split("x"))
        q, k, v, grad = (
            torch.randn(batch, length, heads, args.head_dim).to(dtype).transpose(1, 2)
            for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        want = timed(torchs, exact, grad.double())[2] if length < 4096 else []
        ways = {"torch": torchs, "own": own}
        taken: dict[str, list[list[float]]] = {name: [] for name in ways}
        found: dict[str, list[Tensor]] = {}
        for _ in range(args.repeats):
            for name, way in ways.items():
                *milliseconds, found[name] = timed(way, leaves, grad)
                taken[name].append(milliseconds)
        for name in ways:
            forward, backward = (median(column) for column in zip(*taken[name], strict=True))
            errors = [
                f"{float((a.double() - b).norm() / b.norm()):.1e}"
                for a, b in zip(found[name], want, strict=False)
            ]
            words = f", errors of output, q, k, v: {' '.join(errors)}" if errors else ""
            print(f"{size:7} {name:6} forward {forward:6.1f} backward {backward:6.1f} ms{words}")


if __name__ == "__main__":
    main()
