"""The optimizers by name, and the contract between them and the rest of the trainer.

An optimizer of the table

* has its parameters in groups with `LR_SCALE` and `weight_decay`, and takes the learning rate from
  `set_learning_rate` before every update;
* is updated by `update` only, which can have the kernel divide the gradients, and can hold an
  update back: parameters and state, its count of steps included, then stay bitwise the same, and
  the host doesn't learn of it;
* updates a parameter from that parameter, its gradient and its state only, and, if it is
  `ElementWise`, each element so, which lets `OptimizerInBackward` update one at a time;
* starts with a state of zeros, also if its first update is held back;
* keeps every state as a tensor, in the parameter's layout or with one element: `check_state`
  rejects other state after the first update, because no checkpoint could give it back.

`tests/unit/test_optimizers.py` holds every entry to it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import unwrap
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.config.job_config import JobConfig
from meshwright.config.optimizer import Optimizer
from meshwright.config.training import LRScheduler
from meshwright.models.parameter import Parameter
from meshwright.parallelisms.shards import has_layout_of, is_dtensor, local_shard
from meshwright.system.errors import ConfigError
from meshwright.train.optim.gradients import local_square_sums
from meshwright.train.optim.matrices import OWNED, MatrixFunction, MatrixOptimizer
from meshwright.train.optim.registry import (
    OPTIMIZERS,
    SCHEDULES,
    ElementWise,
    Function,
    Groups,
    Settings,
    settings_of,
)

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def without_compiler(kind: type[Kind]) -> type[Kind]:
    """Return a class as `kind`, but whose methods don't import torch's compiler.

    torch's wrappers, which keep the compiler out of them, import it: 0.8 s of the time to the
    first step. If torch no longer wraps them, they are the methods again.
    """
    methods = {name: unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")}
    methods["step"] = torch.no_grad()(unwrap(kind.step))  # as torch's wrapper does
    return type(kind.__name__, (kind,), methods)


def _build(
    kind: type[torch.optim.Adam], groups: Groups, config: Optimizer
) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    return without_compiler(kind)(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


build_adamw, build_adam = partial(_build, torch.optim.AdamW), partial(_build, torch.optim.Adam)

LR_SCALE = "lr_scale"
"""Key of a parameter group: factor on the job's learning rate."""

PART = "part"
"""Key of a parameter group: number of its optimizer among `SeveralOptimizers`."""


def found(function: Function) -> Callable[..., Any]:
    """Return a function of the registry."""
    return resolve_name(function) if isinstance(function, str) else function


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: Optimizer,
    table: Mapping[str, Parameter],
    ranks: ProcessGroup | None = None,
    own_options: Mapping[str, Any] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Build the optimizer that `config` names, one parameter group for all of the same settings.

    To be built after the parameters are sharded.

    Args:
        named_parameters: with their names in the plain model; of a pipeline, this rank's.
        table: of the plain model.
        ranks: that hold the same parameters; None: this one only.
        own_options: of the user's module, by name.
    """
    groups: dict[Settings, dict[str, Any]] = {}
    heads: dict[nn.Parameter, int] = {}
    for name, parameter in named_parameters:
        settings = settings_of(name, table[name], config)
        group = {"weight_decay": settings.weight_decay, LR_SCALE: settings.lr_scale}
        groups.setdefault(settings, {"params": [], **group})["params"].append(parameter)
        if config.muon.split_heads:
            heads[parameter] = table[name].heads
    parts: list[torch.optim.Optimizer] = []
    for name in dict.fromkeys(settings.optimizer for settings in groups):
        members = [group for settings, group in groups.items() if settings.optimizer == name]
        entry = OPTIMIZERS[name]
        if isinstance(entry, ElementWise):
            parts.append(found(entry.build)(members, config))
        else:
            kind = without_compiler(MatrixOptimizer)
            function = MatrixFunction(
                found(entry.direction), entry.scale, entry.state, own_options.get(name, config.muon)
            )
            parts.append(kind(members, function, config.muon, heads, ranks))
    is_plain = len(parts) == 1 and not isinstance(parts[0], MatrixOptimizer)
    optimizer = parts[0] if is_plain else without_compiler(SeveralOptimizers)(parts)
    set_learning_rate(optimizer, config.lr)
    return optimizer


def check_state(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise `ConfigError` if the optimizer keeps state that no checkpoint could give back.

    Args:
        optimizer: after its first update.
    """
    parts = optimizer.matrix_parts if isinstance(optimizer, SeveralOptimizers) else frozenset()
    in_matrices = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get(PART) in parts
    }
    for name, parameter in named_parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and (value.numel() == 1 or has_layout_of(parameter, value)):
                continue
            if parameter in in_matrices and key.startswith(OWNED):
                continue
            shape = f"of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            of_all = tuple(local_shard(parameter).shape)
            raise ConfigError(
                "optimizer.name",
                f"optimizer.name: your optimizer keeps {key!r} of {name}: {shape}, where this rank "
                f"has {of_all} of the parameter; a checkpoint couldn't be resumed on another mesh"
                "\n  fix: keep a tensor of the parameter's shape or of one element; an optimizer "
                "that needs whole matrices is a MatrixWise with `state`",
            )


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


class OptimizerInBackward:
    """Makes `optimizer` update each parameter as soon as its gradient is final, and frees that.

    Its state and learning rate stay where they are, so checkpoints are the same with or without.
    """

    square_sum: Tensor
    """() fp32: of the gradients of this step so far, as of `local_square_sums`."""
    gradients_are_final: bool
    """Whether a gradient that is computed now is its parameter's last in this step. Where FSDP2
    reduces gradients, it hands over no other."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, index))

    def begin(self, skip_update: Tensor) -> None:
        """Start a step, in which no parameter is to change if `skip_update`, () bool."""
        self._skip_update = skip_update
        self.square_sum = torch.zeros((), device=skip_update.device)
        self.gradients_are_final = True

    def _update(self, group: int, parameter: nn.Parameter) -> None:
        if not self.gradients_are_final:
            return
        square_sum = local_square_sums([("", parameter)], (), self.square_sum.device)[0]
        self.square_sum += square_sum
        optimizer = self._optimizer
        # gradients of other parameters and ranks aren't known yet
        is_bad = self._skip_update | ~torch.isfinite(square_sum)
        groups = optimizer.param_groups
        optimizer.param_groups = [groups[group] | {"params": [parameter]}]
        update(optimizer, is_bad)
        optimizer.param_groups = groups
        parameter.grad = None


def warmup_stable_decay(step: int, steps: int, schedule: LRScheduler) -> float:
    """Return the fraction of the peak learning rate at a step of `steps`, counted from 1.

    Linear from 0 to the peak over `warmup_steps`, then the peak, then down. Step 0 would have 0 and
    step `steps` + 1 would have `min_lr_factor`, so no step has a rate of 0: with D steps of decay,
    the last step is (D - 1) / D of the way down. torchtitan 0.2 counts alike. transformers' decay
    is the same, but its warm-up is a step behind: its first step has a rate of 0.

    Source: Hu et al. 2024, arXiv:2404.06395 (warm-up, stable, decay); "sqrt" is 1 - sqrt(part
    decayed), of Haegele et al. 2024, arXiv:2405.18392.
    """
    warmup_steps, ratio, start = schedule.warmup_steps, schedule.decay_ratio, schedule.decay_start
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = steps - warmup_steps
    if ratio is not None:  # `training.max_epochs` may leave the decay fewer steps than it asks for
        decay_steps = min(decay_steps, round(steps * ratio))
    elif start is not None:
        decay_steps = min(decay_steps, max(steps - start, 0))
    decayed = step - 1 - (steps - decay_steps)
    if min(decayed, decay_steps) <= 0:
        return 1.0
    done = min(decayed / decay_steps, 1.0)  # a mixture with new weights may end later
    left = {
        "linear": 1 - done,
        "sqrt": 1 - math.sqrt(done),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * left


def inverse_sqrt(step: int, steps: int, schedule: LRScheduler) -> float:
    """Return the fraction of the peak learning rate at a step, counted from 1: linear from 0 over
    the W steps of `warmup_steps`, then sqrt(W / step).

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3.
    """
    warmup_steps = max(schedule.warmup_steps, 1)
    if step > warmup_steps:
        return max(math.sqrt(warmup_steps / step), schedule.min_lr_factor)
    return step / warmup_steps


def learning_rate(
    config: JobConfig, steps: int, own_options: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[int], float]:
    """Return the learning rate at each step of a job of `steps`, counted from 1.

    Args:
        own_options: of the user's module, by name.
    """
    schedule = config.lr_scheduler
    steps, fraction = schedule.total_steps or steps, found(SCHEDULES[schedule.name])
    options = own_options.get(schedule.name, schedule)
    return lambda step: config.optimizer.lr * fraction(step, steps, options)
