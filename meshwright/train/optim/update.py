"""The update of parameters: on this rank's shards, and held back without the host's knowing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from meshwright.parallelisms.shards import is_dtensor, local_shard
from meshwright.train.optim.matrices import MatrixOptimizer

LR_SCALE = "lr_scale"
"""Key of a parameter group: factor on the job's learning rate."""

PART = "part"
"""Key of a parameter group: number of its optimizer among `SeveralOptimizers`."""


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers as one: each has its own groups, and all of them one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [
            group | {PART: number}
            for number, part in enumerate(parts)
            for group in part.param_groups
        ]
        super().__init__(groups, {})
        self._parts = parts

    @property
    def matrix_parts(self) -> frozenset[int]:
        """Numbers of the parts that are `MatrixOptimizer`."""
        kinds = enumerate(self._parts)
        return frozenset(number for number, one in kinds if isinstance(one, MatrixOptimizer))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each take its step, with the result of `update`."""
        for number, part in enumerate(self._parts):
            # a load makes new ones of both
            part.param_groups = [group for group in self.param_groups if group[PART] == number]
            part.state = self.state
            told = {k: v for k, v in vars(self).items() if k in ("found_inf", "grad_scale")}
            vars(part).update(told)
            whole_matrices = isinstance(part, MatrixOptimizer)
            with nullcontext() if whole_matrices else _on_local_shards(part):
                if part.param_groups:
                    part.step()
            for name in told:  # a tensor that nobody needs until the next step
                delattr(part, name)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the job's learning rate times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group[LR_SCALE]


def update(
    optimizer: torch.optim.Optimizer, skip_update: Tensor, divisor: Tensor | None = None
) -> None:
    """Update the parameters of `optimizer`, unless they are to stay as they are.

    Args:
        skip_update: () bool, on the device: leave parameters and state bitwise unchanged.
        divisor: () fp32, on the device, of all gradients; None: 1. The kernel divides them as it
            reads them, and leaves them divided.
    """
    # The optimizer would move them itself, but not wait: too early a read for offloaded weights.
    parameter_device = optimizer.param_groups[0]["params"][0].device
    # torch's fused optimizers read these attributes, as GradScaler sets them; without them they
    # would update all the same. They aren't documented: the test of the contract fails if they go.
    optimizer.found_inf = skip_update.float().to(parameter_device)  # type: ignore[attr-defined]
    optimizer.grad_scale = (  # type: ignore[attr-defined]
        None if divisor is None else divisor.to(parameter_device)
    )
    is_one = not isinstance(optimizer, SeveralOptimizers)  # these do so themselves
    with _on_local_shards(optimizer) if is_one else nullcontext():
        optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    # torch's fused optimizers change parameters that torch doesn't count as changed (2.13); those
    # who keep something of the weights, as the scales of float8, look at the count
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


@contextmanager
def _on_local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a step of `optimizer` see this rank's shards instead of DTensors.

    Each update needs nothing of other shards (the contract), so the result is the same. For
    DTensors torch works out at every step how each list of them may be sharded, with whole-size
    tensors. Between steps parameters and states are DTensors, as checkpoints need.
    """
    groups, states = optimizer.param_groups, optimizer.state
    shards: dict[Tensor, nn.Parameter] = {}

    @torch.no_grad()
    def swap(*_: object) -> None:
        optimizer.param_groups, optimizer.state = [], defaultdict(dict)
        for group in groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            local = [local_shard(parameter).detach() for parameter in parameters]
            for shard, parameter in zip(local, parameters, strict=True):
                shard.grad = local_shard(parameter.grad)
                slots = states[parameter]
                optimizer.state[shard] = {key: local_shard(value) for key, value in slots.items()}
                shards[shard] = parameter
            optimizer.param_groups.append(group | {"params": local})

    # the last of the hooks, so that others see parameters
    hook = optimizer.register_step_pre_hook(swap)
    try:
        yield
        for shard, parameter in shards.items():
            slots = optimizer.state.pop(shard)
            for key in [*slots]:  # each is freed before the next is copied: memory is full here
                value = slots.pop(key)
                if key in states[parameter]:
                    continue
                if is_dtensor(parameter) and value.shape == shard.shape:
                    # `DTensor.from_local` would move an offloaded one to the device
                    whole = torch.empty_like(parameter, dtype=value.dtype)
                    local_shard(whole).copy_(value)
                    value = whole
                states[parameter][key] = value  # of the first step
    finally:
        hook.remove()
        optimizer.param_groups, optimizer.state = groups, states
