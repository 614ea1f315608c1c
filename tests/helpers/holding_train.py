"""train.py whose first rank waits after $HOLD_AFTER samples to be killed, and all others for it."""

import os
import time

from meshwright.datasets.loader import Loader, StepData
from meshwright.train.__main__ import start

HOLD_AFTER = int(os.environ["HOLD_AFTER"])
next_of_loader = Loader.__next__


def holding_next(self: Loader) -> StepData:
    data = next_of_loader(self)
    while os.environ.get("RANK", "0") == "0" and data.cursor.sample > HOLD_AFTER:
        time.sleep(1)
    return data


if __name__ == "__main__":
    Loader.__next__ = holding_next
    start()
