"""train.py, one rank of which stalls, as $STALL says: "RANK STEP PLACE WAY". Run by torchrun.

It makes the file $STALLED then.
PLACE: data, forward, validation or save. WAY: stop (SIGSTOP), loop, or read (of a pipe that nobody
writes to).
"""

import os
import signal
from pathlib import Path

import torch

from meshwright.checkpoint.writer import CommittingWriter
from meshwright.datasets.loader import Loader
from meshwright.launch.heartbeat import Heartbeat
from meshwright.models import decoder
from meshwright.train.__main__ import start


def stall(way: str) -> None:
    Path(os.environ["STALLED"]).touch()
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "read":
        os.read(os.pipe()[0], 1)
    else:
        while True:
            pass


def plant(step: int, place: str, way: str) -> None:
    """Have this rank stall there, for good."""
    holder, name = {
        "data": (Loader, "fetch"),
        "forward": (decoder.Decoder, "forward"),
        "validation": (decoder.Decoder, "forward"),
        "save": (CommittingWriter, "write_data"),
    }[place]
    real, seen, update = getattr(holder, name), {"step": 0}, Heartbeat.update

    def noted(self, phase, number=None):
        seen["step"] = seen["step"] if number is None else number
        update(self, phase, number)

    def stalling(*args, **named):
        trains = place != "validation" or not torch.is_grad_enabled()
        if seen["step"] == step and trains:
            stall(way)
        return real(*args, **named)

    Heartbeat.update = noted
    setattr(holder, name, stalling)


if __name__ == "__main__":
    rank, step, place, way = os.environ["STALL"].split()
    if os.environ["RANK"] == rank:
        plant(int(step), place, way)
    start()
