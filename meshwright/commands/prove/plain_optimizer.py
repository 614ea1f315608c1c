"""The shipped optimizers, the learning rate and the mean of weights in plain PyTorch.

As `plain_decoder.py`, it imports nothing of the trainer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from meshwright.commands.prove.plain_decoder import (
    Args,
    Weights,
    has_latents,
    head_width,
    is_recurrent,
    widening,
)
from meshwright.config.job_config import Average
from meshwright.config.optimizer import Muon, Optimizer
from meshwright.config.training import LRScheduler

SHIPPED = ("AdamW", "Adam", "muon")
SCHEDULES = ("wsd", "inverse_sqrt")

SPLIT = {
    **dict.fromkeys(("wq", "wg", "wq_b", "wkv_b"), "n_heads"),
    **dict.fromkeys(("wk", "wv"), "n_kv_heads"),
    **dict.fromkeys(("in_q", "in_k"), "linear_num_key_heads"),
    **dict.fromkeys(("in_v", "in_z"), "linear_num_value_heads"),
}
"""Matrices of several heads by rows, and the dimension that is their number."""


@dataclass(frozen=True)
class Settings:
    """Optimizer settings of one parameter."""

    optimizer: str
    lr_scale: float
    weight_decay: float


def settings(name: str, weight: Tensor, config: Optimizer, ratio: float = 1.0) -> Settings:
    """Return the settings of a parameter by the rules of `[optimizer]` and its groups.

    Matrices and embeddings have weight decay, and vectors don't. Muon takes the matrices of layers,
    but for the filters of convolutions.

    Args:
        ratio: of widths, by which muP lowers the rate of these, and raises their decay.
    """
    # the biases of a layer's experts are stacked: one vector a row
    is_matrix = weight.dim() > (2 if ".experts." in name else 1)
    is_of_layer = is_matrix and name.startswith("layers.") and ".conv_" not in name
    optimizer = "AdamW" if config.name == "muon" and not is_of_layer else config.name
    decay = config.weight_decay if is_matrix or config.decay_norm_and_bias else 0.0
    factor = ratio if is_of_layer else 1.0
    for group in config.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.parameters):
            own = decay if group.weight_decay is None else group.weight_decay
            kind = group.optimizer or optimizer
            return Settings(kind, group.lr_scale / factor, own * factor)
    return Settings(optimizer, 1 / factor, decay * factor)


class PlainMuon(torch.optim.Optimizer):
    """Muon by singular values (Jordan 2024, kellerjordan.github.io/posts/muon).

    Newton-Schulz steps are an odd polynomial of a matrix: they leave its singular vectors as they
    are, and apply the polynomial to each singular value.
    """

    def __init__(self, groups: list[dict[str, Any]], config: Muon) -> None:
        super().__init__(groups, {})
        self._config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A group's `heads` are matrices by rows."""
        config = self._config
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - config.momentum)
                step = weight.grad.lerp(mean, config.momentum) if config.nesterov else mean
                step = step.unflatten(-2, (group["heads"], -1))
                rows, columns = step.shape[-2:]
                left, values, right = torch.linalg.svd(step, full_matrices=False)
                values = values / values.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
                a, b, c = config.coefficients
                for _ in range(config.steps):
                    values = a * values + b * values**3 + c * values**5
                if config.lr_scale == "spectral":
                    scale = math.sqrt(max(1.0, rows / columns))
                else:
                    scale = 0.2 * math.sqrt(max(rows, columns))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                update = (left * values.unsqueeze(-2)) @ right
                weight.sub_(update.view_as(weight), alpha=group["lr"] * scale)


def optimizers(
    weights: Weights, args: Args, config: Optimizer
) -> Iterator[tuple[torch.optim.Optimizer | None, Settings]]:
    """Yield an optimizer for each weight in turn, None if it isn't `SHIPPED`, and its settings."""
    betas = (config.beta1, config.beta2)
    for name, weight in weights.items():
        own, heads = settings(name, weight, config, widening(args)), 1
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if config.muon.split_heads and layer in SPLIT:
            heads = args[SPLIT[layer]]
        group = {"params": [weight], "weight_decay": own.weight_decay, "lr": 0.0, "heads": heads}
        if own.optimizer not in SHIPPED:
            yield None, own
        elif own.optimizer == "muon":
            yield PlainMuon([group], config.muon), own
        else:
            kind = torch.optim.AdamW if own.optimizer == "AdamW" else torch.optim.Adam
            yield kind([group], betas=betas, eps=config.eps, foreach=False), own


@torch.no_grad()
def clip_qk(weights: Weights, largest: Sequence[Tensor], args: Args, threshold: float) -> set[str]:
    """Multiply weights of queries and keys so that no logit would have been above the threshold,
    and return their names.

    Source: Kimi Team 2025, arXiv:2507.20534, algorithm 1. A rotated key that all heads share stays;
    heads that share any other key have one factor.

    Args:
        largest: (N,) logits of the heads of each layer that attends.
    """
    own = [(head_width(args), 0.5)]
    of_heads = {"wq": own, "wk": own}
    if has_latents(args):
        plain, turned = args["qk_nope_head_dim"], args["qk_rope_head_dim"]
        of_heads = {"wq_b" if args["q_lora_rank"] else "wq": [(plain, 0.5), (turned, 1.0)]}
        of_heads["wkv_b"] = [(plain, 0.5), (args["v_head_dim"], 0.0)]
    layers = [n for n in range(args["n_layers"]) if not is_recurrent(args, n)]
    changed = set[str]()
    for layer, logits in zip(layers, largest, strict=True):
        groups = logits.view(args["n_kv_heads"], -1).tolist()
        factors = [threshold / max(threshold, *group) for group in groups]
        names = [f"layers.{layer}.attention.{kind}" for kind in of_heads]
        for name in [f"{one}.{end}" for one in names for end in ("weight", "bias")]:
            if name not in weights:
                continue
            changed.add(name)
            parts, row = of_heads[name.split(".")[-2]], 0
            heads = len(weights[name]) // sum(width for width, _ in parts)
            for head in range(heads):
                for width, power in parts:
                    weights[name][row : row + width] *= (
                        factors[head * len(factors) // heads] ** power
                    )
                    row += width
    return changed


def schedule(step: int, steps: int, config: LRScheduler) -> float:
    """Return the fraction of the peak learning rate at a step, counted from 1.

    Warm-up is a line from 0 at step 0 to 1. Decay takes the last steps, and would reach
    `min_lr_factor` one step after the last.
    """
    steps, warmup = config.total_steps or steps, config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.name == "inverse_sqrt":
        return max((max(warmup, 1) / step) ** 0.5, config.min_lr_factor)
    length = steps - warmup
    if config.decay_ratio is not None:
        length = min(length, round(config.decay_ratio * steps))
    if config.decay_start is not None:
        length = min(length, max(steps - config.decay_start, 0))
    passed = step - (steps + 1 - length)  # of the decay, which ends where it is `length`
    done = min(max(passed, 0) / length, 1.0) if length > 0 else 0.0
    left = {
        "linear": 1 - done,
        "sqrt": 1 - done**0.5,
        "cosine": math.cos(math.pi / 2 * done) ** 2,
    }[config.decay_type]
    return config.min_lr_factor + (1 - config.min_lr_factor) * left


def kept_share(config: Average, tokens_per_step: int) -> float | None:
    """Return the share of the EMA of weights that a step keeps; None: there is no mean."""
    if config.window_tokens is not None:
        return 1 - tokens_per_step / config.window_tokens
    return config.decay


def spikes(values: Sequence[float], limit: float, window: int) -> Iterator[bool]:
    """Yield of each value whether it is a spike: `limit` standard deviations above the mean.

    Mean and variance are of the values before that are none. Of the first `window`, none is, and
    all weigh the same; later ones weigh 1 / `window` (Finch 2009, "Incremental calculation of
    weighted mean and variance").
    """
    count, mean, variance = 0, 0.0, 0.0
    for value in values:
        is_spike = count >= window and value > mean + limit * math.sqrt(variance)
        yield is_spike
        if not is_spike:
            count += 1
            weight, distance = 1 / min(count, window), value - mean
            mean += weight * distance
            variance = (1 - weight) * (variance + weight * distance**2)
