"""train.py, whose loss is multiplied at some steps, as $FACTORS says by step: {"7": NaN}.

Run by torchrun. What is not finite is so on the last rank alone.
"""

import json
import math
import os
from contextlib import ExitStack

from meshwright.train import trainer
from meshwright.train.__main__ import start
from meshwright.train.trainer import StepResult, train_step
from tests.helpers.faults import loss_times


def faulty_step(*args: object, step: int, **options: object) -> StepResult:
    factor = json.loads(os.environ["FACTORS"]).get(str(step), 1.0)
    is_last_rank = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    with ExitStack() as stack:
        if math.isfinite(factor) or is_last_rank:
            stack.enter_context(loss_times(factor))
        return train_step(*args, step=step, **options)


if __name__ == "__main__":
    trainer.train_step = faulty_step
    start()
