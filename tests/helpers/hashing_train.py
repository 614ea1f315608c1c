"""train.py, which also notes what it reads: a line `step slot hash` for each sequence of this rank.

Run by torchrun; notes go to RANK.PID.txt in the folder that $NOTES names. After step $HOLD_AFTER,
if given, the first rank waits to be killed, and all others for it.
"""

import hashlib
import os
import time

import torch

from meshwright.datasets.loader import Loader, StepData
from meshwright.train.__main__ import start

HOLD_AFTER = float(os.environ.get("HOLD_AFTER", "inf"))
next_of_loader = Loader.__next__


def noting_next(self: Loader) -> StepData:
    data = next_of_loader(self)
    stream = self._stream
    step = data.cursor.sample // stream.batch
    sequences = [
        (tokens, labels)
        for batch in data.batches
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
    ]
    rank = os.environ.get("RANK", "0")
    path = os.path.join(os.environ["NOTES"], f"{rank}.{os.getpid()}.txt")
    with open(path, "a") as file:
        for slot, pair in zip(sorted(stream.slots), sequences, strict=True):
            digest = hashlib.sha256(torch.cat(pair).numpy().tobytes()).hexdigest()
            file.write(f"{step} {slot} {digest}\n")
    while rank == "0" and step > HOLD_AFTER:
        time.sleep(1)
    return data


if __name__ == "__main__":
    Loader.__next__ = noting_next
    start()
