"""Ranks that compute wrongly, on purpose, and a sentry on the model of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.job_config import JobConfig
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.shards import local_shard
from meshwright.system.errors import SickRankError
from meshwright.train.sentry import Sentry
from tests.helpers.job import Job
from tests.helpers.tiny import SEQ_LEN

BITS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class Flip:
    """A bit of one element of a product, which comes out wrong whenever it's computed."""

    module: str
    product: str
    """forward: the output. input: the gradient of the input. weight: the gradient of the weight."""
    bit: int
    place: float
    """Of the element, from 0 to 1."""

    def of(self, result: Tensor) -> Tensor:
        """Return the result with the bit flipped."""
        flipped = result.detach().clone().contiguous()
        kind = BITS[result.itemsize]
        bits = local_shard(flipped).view(kind).view(-1)
        # the highest bit is the sign of a whole number
        mask = 1 << self.bit if self.bit < 8 * result.itemsize - 1 else torch.iinfo(kind).min
        bits[int(self.place * len(bits))] ^= mask
        return flipped


class _Through(torch.autograd.Function):
    """The result, flipped, with the gradient of the right one."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, flip: Flip) -> Tensor:
        return flip.of(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@contextmanager
def flipping(job: Job, flip: Flip, *, is_once: bool = False) -> Iterator[None]:
    """Within, this rank computes one product wrongly, or does so once, of an output."""
    module = next(stage for stage in job.model.stages if has(stage, flip.module))
    layer = module.get_submodule(flip.module)
    hooks, of_weight = [], []
    if flip.product == "forward":

        def lie(_: object, x: object, out: Tensor) -> Tensor:
            if is_once:
                hooks[0].remove()
            return _Through.apply(out, flip)

        hooks.append(layer.register_forward_hook(lie))
    elif flip.product == "input":
        hooks.append(layer.register_full_backward_hook(lambda _, of_x, out: (flip.of(of_x[0]),)))
    else:
        # FSDP2 gives the layer its weight for the time of its forward

        def watch(layer: nn.Module, _: object) -> None:
            while of_weight:
                of_weight.pop().remove()
            of_weight.append(layer.weight.register_hook(flip.of))

        hooks += [layer.register_forward_pre_hook(watch)]
    try:
        yield
    finally:
        for hook in hooks + of_weight:
            hook.remove()


def has(stage: nn.Module, name: str) -> bool:
    """Whether a stage has the layer of this name."""
    return any(own == name for own, _ in stage.named_modules())


def sentry_of(job: Job, dims: ParallelDims, folder: str = ".", **training: object) -> Sentry:
    """As the trainer builds it."""
    config = JobConfig.model_validate(
        {
            "job": {"dump_folder": folder},
            "training": {"seq_len": SEQ_LEN, "local_batch_size": job.size, **training},
            "sentry": {"interval": 1},
        }
    )
    resolved: Any = SimpleNamespace(config=config, dims=dims)
    return Sentry(resolved, job.meshes, job.trainer)


def alarm(sentry: Sentry, step: int) -> str:
    """The error that a comparison ends with; "": none."""
    try:
        sentry.after_step(step, ())
    except SickRankError as error:
        return str(error)
    return ""
