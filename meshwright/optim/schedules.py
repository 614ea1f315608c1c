"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore."""

import math
from typing import Literal

DecayType = Literal["linear", "sqrt", "cosine"]


def warmup_stable_decay(
    step: int,
    *,
    steps: int,
    warmup_steps: int,
    decay_ratio: float | None,
    decay_type: DecayType,
    min_lr_factor: float,
) -> float:
    """Fraction of the peak learning rate at optimizer step `step`, counted from 1.

    Linear from 0 to the peak over `warmup_steps`, then the peak, then down. Step 0 would have 0 and
    step `steps` + 1 would have `min_lr_factor`, so no step has a rate of 0: with D steps of decay,
    the last step is (D - 1) / D of the way down. torchtitan 0.2 and transformers count alike.

    Source: Hu et al. 2024, arXiv:2404.06395 (warm-up, stable, decay); "sqrt" is 1 - sqrt(part
    decayed), of Haegele et al. 2024, arXiv:2405.18392.

    Args:
        steps: of the whole job.
        decay_ratio: part of `steps` spent decaying; None: all steps after the warm-up.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = steps - warmup_steps if decay_ratio is None else round(steps * decay_ratio)
    decayed = step - 1 - (steps - decay_steps)
    if decayed <= 0:
        return 1.0
    done = decayed / decay_steps
    left = {
        "linear": 1 - done,
        "sqrt": 1 - math.sqrt(done),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[decay_type]
    return min_lr_factor + (1 - min_lr_factor) * left
