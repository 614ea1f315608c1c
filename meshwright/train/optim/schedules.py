"""The learning rate at each step."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.config.training import LRScheduler
from meshwright.train.optim.optimizers import found
from meshwright.train.optim.registry import SCHEDULES


def warmup_stable_decay(step: int, steps: int, schedule: LRScheduler) -> float:
    """Return the fraction of the peak learning rate at a step of `steps`, counted from 1.

    Linear from 0 to the peak over `warmup_steps`, then the peak, then down. Step 0 would have 0 and
    step `steps` + 1 would have `min_lr_factor`, so no step has a rate of 0: with D steps of decay,
    the last step is (D - 1) / D of the way down. torchtitan 0.2 counts alike. transformers' decay
    is the same, but its warm-up is a step behind: its first step has a rate of 0.

    Source: Hu et al. 2024, arXiv:2404.06395 (warm-up, stable, decay); "sqrt" is 1 - sqrt(part
    decayed), of Haegele et al. 2024, arXiv:2405.18392.
    """
    warmup_steps, ratio, start = schedule.warmup_steps, schedule.decay_ratio, schedule.decay_start
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = steps - warmup_steps
    if ratio is not None:  # `training.max_epochs` may leave the decay fewer steps than it asks for
        decay_steps = min(decay_steps, round(steps * ratio))
    elif start is not None:
        decay_steps = min(decay_steps, max(steps - start, 0))
    decayed = step - 1 - (steps - decay_steps)
    if min(decayed, decay_steps) <= 0:
        return 1.0
    done = min(decayed / decay_steps, 1.0)  # a mixture with new weights may end later
    left = {
        "linear": 1 - done,
        "sqrt": 1 - math.sqrt(done),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * left


def inverse_sqrt(step: int, steps: int, schedule: LRScheduler) -> float:
    """Return the fraction of the peak learning rate at a step, counted from 1: linear from 0 over
    the W steps of `warmup_steps`, then sqrt(W / step).

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3.
    """
    warmup_steps = max(schedule.warmup_steps, 1)
    if step > warmup_steps:
        return max(math.sqrt(warmup_steps / step), schedule.min_lr_factor)
    return step / warmup_steps


def learning_rate(
    config: JobConfig, steps: int, own_options: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[int], float]:
    """Return the learning rate at each step of a job of `steps`, counted from 1.

    Args:
        own_options: of the user's module, by name.
    """
    schedule = config.lr_scheduler
    steps, fraction = schedule.total_steps or steps, found(SCHEDULES[schedule.name])
    options = own_options.get(schedule.name, schedule)
    return lambda step: config.optimizer.lr * float(fraction(step, steps, options))
