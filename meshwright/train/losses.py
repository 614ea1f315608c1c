"""The losses of the user's module, by name. Free of torch."""

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.system.errors import check, did_you_mean

CROSS_ENTROPY = "cross_entropy"
"""The loss of `models/loss.py`."""

LOSSES: dict[str, Callable[..., Any]] = {}
"""By name: from the hidden states (T, D) of a chunk of tokens, their logits (T, V) fp32, targets
(T,) int64 and the options of [options.NAME] to the loss of each token, (T,)."""


def own_loss(config: JobConfig, own_options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the user's loss that the config names, as `SummedLoss` takes it; None: cross entropy.

    Args:
        own_options: of the user's module, by name.

    Raises:
        ConfigError: if there is no such loss.
    """
    name = config.training.loss
    if name == CROSS_ENTROPY:
        return None
    fix = did_you_mean(name, [CROSS_ENTROPY, *LOSSES])
    check(name in LOSSES, "training.loss", name, "no such loss", fix)
    return bound(LOSSES[name], own_options.get(name))


def bound(loss: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """Return a loss of states, logits and targets, whose fourth argument may have any name."""
    return lambda states, logits, targets: loss(states, logits, targets, options)
