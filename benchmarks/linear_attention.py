"""Linear attention on this CPU or GPU: in chunks, token by token, and beside softmax attention.

Forward and backward of the gated delta rule, which is the part of such a layer where information
passes from token to token, and of causal attention with as many heads, in turns: medians of
processor time, on a GPU in bf16 of time, with fla's kernel where it is installed; and of its ratio
to the chunked form's in the same turn. Errors of the output and of
the gradients of queries, keys and values against the recurrence in fp64, relative to their size.

    OMP_NUM_THREADS=1 python -m benchmarks.linear_attention
    OMP_NUM_THREADS=1 python -m benchmarks.linear_attention --sizes 1x2048 --head-dim 128
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from meshwright.models.attention import CausalAttention
from meshwright.models.delta_rule import gated_delta_rule
from meshwright.parallelisms.cpu_kernels import attention
from meshwright.parallelisms.delta_kernel import delta_rule, why_missing
from tests.helpers.delta import recurrence

LONGEST_EXACT = 2048
"""Tokens up to which errors are known: in fp64 each token's state takes twice the memory."""


def in_chunks(*leaves: Tensor) -> Tensor:
    """Return what the gated delta rule gives, as a layer computes it."""
    return gated_delta_rule(*leaves)[0]


def by_token(*leaves: Tensor) -> Tensor:
    """Return the same from the rule as it is written down, a token at a time."""
    return recurrence(*leaves)[0]


def by_softmax(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return causal attention of the same queries, keys and values; it has no decay."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return core(*heads, scale=q.shape[-1] ** -0.5, window=None).transpose(1, 2)

    return attend


def timed(
    way: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor
) -> tuple[float, float, list[Tensor]]:
    """Return milliseconds of forward and of backward, the output and the gradients of q, k, v."""
    start = _now(grad)
    out = way(*leaves)
    middle = _now(grad)
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
    end = _now(grad)
    return 1e3 * (middle - start), 1e3 * (end - middle), [out.detach(), *grads[:3]]


def _now(grad: Tensor) -> float:
    if grad.is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def draw(batch: int, seq_len: int, args: argparse.Namespace) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, decay and strength of a layer as it starts, and a gradient of its output."""
    heads, shape = args.heads, (batch, seq_len, args.heads)
    q, k, v, grad = (torch.randn(*shape, args.head_dim) for _ in range(4))
    # rates and steps as models/delta.py draws them
    decay = -16 * torch.rand(heads) * 0.001 * 100 ** torch.rand(shape)
    leaves = [q, k, v, decay, torch.rand(shape)]
    if torch.cuda.is_available():
        leaves = [x.cuda() if x is decay else x.cuda().bfloat16() for x in leaves]
        grad = grad.cuda()
    return [x.requires_grad_() for x in leaves], grad


def main() -> None:
    """Print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = ["1x512", "1x1024", "1x2048", "1x4096", "1x8192"]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="sequences x tokens")
    for flag, default in (("heads", 8), ("head-dim", 64), ("repeats", 5)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    args = parser.parse_args()
    ways = {"chunks": in_chunks, "recurrence": by_token, "softmax": by_softmax(CausalAttention())}
    if torch.cuda.is_available():
        if not why_missing():
            ways["fla"] = lambda *leaves: delta_rule(*leaves, None)
    elif not attention.why_not(args.head_dim, torch.float32):
        ways["softmax, own kernel"] = by_softmax(attention.attend)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    for size in args.sizes:
        batch, seq_len = map(int, size.split("x"))
        leaves, grad = draw(batch, seq_len, args)
        exact: list[Tensor] = []
        if seq_len <= LONGEST_EXACT:
            doubles = [x.detach().double().requires_grad_() for x in leaves]
            exact = timed(by_token, doubles, grad.double())[2]
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        results: dict[str, list[Tensor]] = {}
        for _ in range(args.repeats):
            for name, way in ways.items():
                forward, backward, results[name] = timed(way, leaves, grad)
                taken[name].append((forward, backward))
        for name in ways:
            forward, backward = (median(column) for column in zip(*taken[name], strict=True))
            pairs = zip(taken[name], taken["chunks"], strict=True)
            ratio = median(sum(own) / sum(chunked) for own, chunked in pairs)
            times = f"forward {forward:7.1f} backward {backward:7.1f} ms, {ratio:5.2f} of chunks"
            errors = [
                f"{float((x.double() - y).norm() / y.norm()):.1e}"
                for x, y in zip(results[name], exact, strict=False)
            ]
            words = "" if "softmax" in name or not errors else f", errors {' '.join(errors)}"
            print(f"{size:7} {name:19} {times}{words}", flush=True)


if __name__ == "__main__":
    main()
