"""Cost of a layer with experts over a dense one of equal active FLOPs, in processor seconds.

Both feed-forwards see the same fp32 tokens, forward and backward, in turns, on one thread:
processor time, unlike a clock's, hardly depends on other work of the machine. Each pair gives a
ratio; the last line of a case is their median. Give malloc the settings of a job's launcher:

    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592
    python benchmarks/experts.py

With --step it is a step of a Qwen3-MoE of four such layers, with AdamW, over one of transformers
with the same weights and batch, by each of its implementations of experts:

    python -m benchmarks.experts --step --pairs 7 --tokens 512
"""

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.decoder import Decoder
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.layers import FeedForward
from meshwright.models.mixture import Mixture
from meshwright.models.router import BalanceLosses
from meshwright.models.table import FeedForwardSpec, MixtureSpec

CASES = {"E 16, K 4": (16, 4), "E 64, K 8": (64, 8)}
WARM_UP = 3  # pairs that are not counted
STD = 0.02


def layers_of(dim: int, n_experts: int, n_active: int) -> tuple[Mixture, FeedForward]:
    """A mixture, and a feed-forward of as many multiplications per token, both initialised."""
    hidden = 2 * dim
    torch.manual_seed(0)
    mixture = Mixture(
        MixtureSpec(dim, hidden // n_active, n_experts, n_active, True, std=STD, out_std=STD)
    )
    mixture.losses = BalanceLosses(batch=1e-6)
    dense = FeedForward(FeedForwardSpec(dim, hidden, std=STD, out_std=STD))
    for parameter in [*mixture.parameters(), *dense.parameters()]:
        nn.init.normal_(parameter, std=STD)
    return mixture, dense


def seconds_of(layer: nn.Module, x: torch.Tensor) -> float:
    """Processor seconds of a forward and a backward."""
    layer.zero_grad()
    x.grad = None
    upstream = torch.ones_like(x)
    start = time.process_time()
    out = layer(x)
    (out[0] if isinstance(out, tuple) else out).backward(upstream)
    return time.process_time() - start


SEQ_LEN, VOCAB_SIZE = 256, 4096
Step = Callable[[], tuple[float, float]]
"""Takes a step; its loss and processor seconds."""


def steps_of(dim: int, n_experts: int, n_active: int, tokens: int) -> dict[str, Step]:
    """Ours, and that of each implementation of transformers."""
    from tests.helpers.hf import in_transformers, random_model  # needs transformers

    sizes = {"n_experts": n_experts, "n_active": n_active, "expert_dim": 2 * dim // n_active}
    args = Qwen3MoeArgs(dim, 4, dim // 64, dim // 128, 2 * dim, VOCAB_SIZE, head_dim=64, **sizes)
    ours = random_model(args, SEQ_LEN)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=STD)
    batch = torch.randint(VOCAB_SIZE, (2, tokens // SEQ_LEN, SEQ_LEN))
    models: dict[str, nn.Module] = {"ours": ours}
    for name in ("eager", "grouped_mm"):
        models[name] = in_transformers(ours)
        models[name].set_experts_implementation(name)
    return {name: step_of(model, *batch) for name, model in models.items()}


def step_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Step:
    """Forward, loss, backward and update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def take() -> tuple[float, float]:
        start = time.process_time()
        if isinstance(model, Decoder):
            loss = model(tokens, labels) / labels.numel()
        else:
            logits = model(tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), time.process_time() - start

    return take


def compare_steps(name: str, steps: dict[str, Step], pairs: int) -> None:
    """Print the medians, and those of the ratios of steps that were taken in turns."""
    rounds = [{key: take() for key, take in steps.items()} for _ in range(WARM_UP + pairs)]
    last = ", ".join(f"{key} {loss:.6f}" for key, (loss, _) in rounds[-1].items())
    print(f"{name}: loss of step {len(rounds)}: {last}")
    for key in steps:
        seconds = [one[key][1] for one in rounds[WARM_UP:]]
        ratios = [one["ours"][1] / one[key][1] for one in rounds[WARM_UP:]]
        print(f"{key}: {1e3 * median(seconds):.0f} ms; ours over it: {median(ratios):.3f}")


def main() -> None:
    """Print each case's median seconds and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--step", action="store_true", help="a step beside transformers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(1, given.tokens, given.dim).requires_grad_()
    for name, (n_experts, n_active) in CASES.items():
        if given.step:
            steps = steps_of(given.dim, n_experts, n_active, given.tokens)
            compare_steps(name, steps, given.pairs)
            continue
        mixture, dense = layers_of(given.dim, n_experts, n_active)
        pairs = [
            (seconds_of(mixture, x), seconds_of(dense, x)) for _ in range(WARM_UP + given.pairs)
        ][WARM_UP:]
        ratios = [sparse / plain for sparse, plain in pairs]
        low, _, high = quantiles(ratios, n=4)
        sparse, plain = (1e3 * median(part) for part in zip(*pairs, strict=True))
        print(f"{name}: experts {sparse:.0f} ms, dense {plain:.0f} ms, torch {torch.__version__}")
        print(f"median ratio (quartiles {low:.2f} to {high:.2f}):\n{median(ratios):.3f}")


if __name__ == "__main__":
    main()
