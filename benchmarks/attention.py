"""Causal attention on this CPU: torch's, and the kernel of cpu_kernels.

Forward and backward of one layer, causal and with windows: medians, in turns; and errors of the
output and of the gradients against fp64, relative to their size.

    python benchmarks/attention.py
    python benchmarks/attention.py --dtype float32
    python benchmarks/attention.py --dtype float32 --sizes 1x2048 --windows 128 512 1024
    python benchmarks/attention.py --sizes 1x8192 --heads 32 --kv-heads 8 --head-dim 128
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.parallelisms.cpu_kernels import attention

WAYS = {"torch": CausalAttention(), "own": attention.attend}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def timed(
    way: Callable[..., Tensor],
    leaves: list[Tensor],
    grad: Tensor,
    window: int | None,
    clock: Callable[[], float],
) -> tuple[float, float, list[Tensor]]:
    """Return milliseconds of forward and of backward, the output and the gradients."""
    start = clock()
    out = way(*leaves, scale=leaves[0].shape[-1] ** -0.5, window=window)
    middle = clock()
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return 1e3 * (middle - start), 1e3 * (clock() - middle), found


def main() -> None:
    """Print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = ["4x512", "2x1024", "1x2048", "1x8192"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="sequences x tokens")
    for flag, default in (("heads", 8), ("kv-heads", 4), ("head-dim", 64), ("repeats", 12)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--windows", nargs="*", type=int, default=[], help="beside full attention")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of all threads")
    args = parser.parse_args()
    dtype, clock = getattr(torch, args.dtype), CLOCKS[args.clock]
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
        cases = [(name, window) for window in (None, *args.windows) for name in WAYS]
        want: dict[int | None, list[Tensor]] = {}
        if length < 4096:
            for window in (None, *args.windows):
                want[window] = timed(WAYS["torch"], exact, grad.double(), window, clock)[2]
        taken: dict[tuple[str, int | None], list[list[float]]] = {case: [] for case in cases}
        found: dict[tuple[str, int | None], list[Tensor]] = {}
        for _ in range(args.repeats):
            for name, window in cases:
                *milliseconds, found[name, window] = timed(WAYS[name], leaves, grad, window, clock)
                taken[name, window].append(milliseconds)
        for name, window in cases:
            columns = zip(*taken[name, window], strict=True)
            forward, backward = (median(column) for column in columns)
            errors = [
                f"{float((a.double() - b).norm() / b.norm()):.1e}"
                for a, b in zip(found[name, window], want.get(window, []), strict=False)
            ]
            words = f", errors of output, q, k, v: {' '.join(errors)}" if errors else ""
            keys = "full" if window is None else f"W {window}"
            times = f"forward {forward:6.1f} backward {backward:6.1f} ms"
            print(f"{size:7} {keys:6} {name:6} {times}{words}")


if __name__ == "__main__":
    main()
