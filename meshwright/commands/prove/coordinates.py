"""The coordinate check: with muP, one step changes activations and logits by as much at any width.

Source: Yang et al. 2022, arXiv:2203.03466, appendix D.1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.config.job_config import JobConfig
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.models.mup import MupArgs
from meshwright.parallelisms.initialize import initialize
from meshwright.system.errors import config_error
from meshwright.train.optim.optimizers import build_optimizer

WIDTHS = (64, 128, 256, 512, 1024)
NUM_STEPS, NUM_LAYERS, HEAD_DIM = 5, 2, 16
NUM_SEQUENCES, SEQ_LEN, VOCAB_SIZE = 8, 32, 256

BOUND = 1.3
"""Largest over smallest value of a quantity over widths."""


@dataclass(frozen=True)
class Coordinate:
    """A quantity that muP keeps, at each width."""

    name: str
    values: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Largest over smallest; infinite if some aren't positive."""
        return max(self.values) / min(self.values) if min(self.values) > 0 else math.inf

    @property
    def failure(self) -> str:
        """The line of a quantity that depends on the width; "": it doesn't."""
        if self.spread <= BOUND:
            return ""
        first, last = self.values[0], self.values[-1]
        return (
            f"{self.name} is {first:.3g} at width {WIDTHS[0]} and {last:.3g} at {WIDTHS[-1]}: "
            f"largest over smallest {self.spread:.2f}, bound {BOUND}"
        )


def check_coordinates(config: JobConfig, args: DecoderArgs) -> Iterator[Coordinate]:
    """Train small models of every width for a few steps on one batch, and return what changes.

    The smallest width is their base, the learning rate the config's.

    Raises:
        ConfigError: if the model has no muP.
    """
    if not isinstance(args, MupArgs) or args.mup_base_dim is None:
        fix = "set model.args.mup_base_dim to the width that you chose the learning rate for"
        raise config_error("--coordinates", True, "the model doesn't have muP", fix)
    return _coordinates(config, args)


def _coordinates(config: JobConfig, args: MupArgs) -> Iterator[Coordinate]:
    by_width = [_train(config, widened(args, width)) for width in WIDTHS]
    for name in by_width[0]:
        yield Coordinate(name, tuple(values[name] for values in by_width))


def widened(args: MupArgs, width: int) -> MupArgs:
    """Return a small model of a width, with heads of a fixed width and the grouping of `args`."""
    heads = width // HEAD_DIM
    group = math.gcd(args.n_heads // args.n_kv_heads, WIDTHS[0] // HEAD_DIM)
    return replace(
        args,
        dim=width,
        n_layers=NUM_LAYERS,
        n_heads=heads,
        n_kv_heads=heads // group,
        hidden_dim=round(args.hidden_dim / args.dim * width),
        vocab_size=VOCAB_SIZE,
        head_dim=HEAD_DIM,
        mup_base_dim=WIDTHS[0],
    )


def _train(config: JobConfig, args: MupArgs) -> dict[str, float]:
    """Return the RMS of results of layers at the start, and of their changes by each step; and the
    decrease of the loss, which stands for logits: their RMS has a part that is noise of the width.
    """
    model = Decoder(args, SEQ_LEN)
    initialize(model, config.training.seed)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, args.table.parameters)
    generator = torch.Generator().manual_seed(config.training.seed)
    text = torch.randint(VOCAB_SIZE, (NUM_SEQUENCES, SEQ_LEN + 1), generator=generator)
    first_loss, first = _forward(model, text)
    found = {f"{name} at the start": _rms(x) for name, x in first.items()}
    for step in range(1, NUM_STEPS + 1):
        _loss(model, text).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss, results = _forward(model, text)
        found |= {
            f"change of {name} by step {step}": _rms(x - first[name]) for name, x in results.items()
        }
        found[f"decrease of the loss by step {step}"] = first_loss - loss
    return found


def _loss(model: Decoder, text: Tensor) -> Tensor:
    labels = text[:, 1:]
    return model(text[:, :-1], labels) / labels.numel()


@torch.no_grad()
def _forward(model: Decoder, text: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and the result of each layer by its name."""
    found: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, __: object, output: Tensor) -> None:
        found[f"layers.{name}"] = output

    hooks = [
        block.register_forward_hook(partial(note, name)) for name, block in model.layers.items()
    ]
    loss = _loss(model, text).item()
    for hook in hooks:
        hook.remove()
    return loss, found


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
