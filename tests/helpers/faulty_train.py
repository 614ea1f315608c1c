"""train.py, whose loss is multiplied at some steps, as $FACTORS says by step: {"7": NaN}.

Run by torchrun. What is not finite is so on the last rank alone.
"""

import json
import math
import os
from contextlib import ExitStack

from meshwright.train.__main__ import start
from meshwright.train.trainer import StepResult, Trainer
from tests.helpers.faults import loss_times

sound_step = Trainer.step


def faulty_step(trainer: Trainer, step: int, *args: object) -> StepResult:
    factor = json.loads(os.environ["FACTORS"]).get(str(step), 1.0)
    is_last_rank = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    with ExitStack() as stack:
        if math.isfinite(factor) or is_last_rank:
            stack.enter_context(loss_times(factor))
        return sound_step(trainer, step, *args)


if __name__ == "__main__":
    Trainer.step = faulty_step
    start()
