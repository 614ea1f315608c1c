"""train.py with one bit flipped on one rank in one step, as $FLIP says: "VALUE STEP RANK ELEMENT
BIT [PARAMETER]", where VALUE is weight, gradient, collective, or a key of the optimizer's state.

Without $FLIP nothing is. Run by torchrun. ELEMENT is counted in the rank's own shard. The
collective is the sum of squares of gradients over all ranks, which clipping needs.
"""

import os

import torch
from torch import Tensor

from meshwright.parallelisms.shards import local_shard
from meshwright.train import trainer
from meshwright.train.__main__ import start
from meshwright.train.trainer import Trainer

value, at, rank, element, bit, *names = os.environ.get("FLIP", "nothing 0 0 0 0").split()
sound_step, sound_sums, sound_reduction = Trainer.step, Trainer.forward_backward, trainer.summed
is_due = False


def flip(tensor: Tensor) -> None:
    words = local_shard(tensor.detach()).view(-1).view(torch.int32)
    words[int(element)] ^= 1 << int(bit)


def faulty_step(job: Trainer, step: int, *args: object) -> object:
    global is_due
    is_due = step == int(at) and os.environ.get("RANK", "0") == rank
    parameters = dict(job.model.named_parameters())
    if is_due and value == "weight":
        flip(parameters[names[0]])
    elif is_due and value not in ("gradient", "collective"):
        flip(job.optimizer.state[parameters[names[0]]][value])
    return sound_step(job, step, *args)


def faulty_sums(job: Trainer, *args: object) -> Tensor:
    loss = sound_sums(job, *args)
    if is_due and value == "gradient":
        flip(dict(job.model.named_parameters())[names[0]].grad)
    return loss


def faulty_reduction(*parts: Tensor) -> list[Tensor]:
    sums = sound_reduction(*parts)
    if is_due and value == "collective":
        flip(sums[1])
    return sums


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer.step, Trainer.forward_backward = faulty_step, faulty_sums
    trainer.summed = faulty_reduction
    start()
