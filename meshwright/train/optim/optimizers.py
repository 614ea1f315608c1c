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

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import unwrap
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.config.optimizer import Optimizer
from meshwright.models.parameter import Parameter
from meshwright.parallelisms.shards import has_layout_of, local_shard
from meshwright.system.errors import ConfigError
from meshwright.train.optim.matrices import OWNED, MatrixFunction, MatrixOptimizer
from meshwright.train.optim.registry import (
    OPTIMIZERS,
    ElementWise,
    Function,
    Groups,
    Settings,
    settings_of,
)
from meshwright.train.optim.update import LR_SCALE, PART, SeveralOptimizers, set_learning_rate

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


def found(function: Function) -> Callable[..., Any]:
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
            own = [own_options[name]] if name in own_options else []
            parts.append(found(entry.build)(members, config, *own))
        else:
            kind = without_compiler(MatrixOptimizer)
            options = own_options.get(name, config.muon)
            direction, has_weights = found(entry.direction), entry.has_weights
            function = MatrixFunction(direction, entry.scale, entry.state, has_weights, options)
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
