"""train.py whose first rank waits after $HOLD_AFTER samples to be killed, and all others for it.

In the folder that $NOTES names, if given, it notes what it reads in RANK.PID.txt: a line `step slot
hash` for each sequence of this rank.
"""

import hashlib
import os
import time

import torch

from meshwright.datasets.loader import Loader, StepData
from meshwright.train.__main__ import start

HOLD_AFTER = float(os.environ.get("HOLD_AFTER", "inf"))
next_of_loader = Loader.__next__


def holding_next(self: Loader) -> StepData:
    data, rank = next_of_loader(self), os.environ.get("RANK", "0")
    if "NOTES" in os.environ:
        note(self, data, rank)
    while rank == "0" and data.cursor.sample > HOLD_AFTER:
        time.sleep(1)
    return data


def note(loader: Loader, data: StepData, rank: str) -> None:
    stream = loader._stream
    step = data.cursor.sample // stream.batch
    sequences = [
        (tokens, labels)
        for batch in data.batches
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
    ]
    path = os.path.join(os.environ["NOTES"], f"{rank}.{os.getpid()}.txt")
    with open(path, "a") as file:
        for slot, pair in zip(sorted(stream.slots), sequences, strict=True):
            digest = hashlib.sha256(torch.cat(pair).numpy().tobytes()).hexdigest()
            file.write(f"{step} {slot} {digest}\n")


if __name__ == "__main__":
    Loader.__next__ = holding_next
    start()
