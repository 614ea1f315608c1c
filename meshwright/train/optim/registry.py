"""The optimizers by name; optimizer, learning rate and weight decay of each parameter, by its name;
and the decay of the mean of all. Free of torch."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.config.job_config import JobConfig
from meshwright.config.optimizer import Muon, Optimizer, ParameterGroup
from meshwright.models.parameter import Parameter
from meshwright.system.errors import (
    ConfigError,
    UnknownNameError,
    check,
    config_error,
    did_you_mean,
)
from meshwright.system.modules import describe_error, file_of

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""

Function = Callable[..., Any] | str
"""A function, or "package.module:name" of one: then its module isn't imported by a check."""


@dataclass(frozen=True)
class ElementWise:
    """An optimizer that updates each element by itself, so that it may see any shard."""

    build: Function
    """From parameter groups, the section `optimizer` and the options of [options.NAME], if there is
    a model of them, to a fused `torch.optim.Optimizer`."""


@dataclass(frozen=True)
class MatrixWise:
    """An optimizer whose update of a matrix follows from the whole of it, on any mesh.

    Momentum, weight decay and the learning rate are applied around it (`matrices.py`). The
    options that its functions get are those of [options.NAME], if its module has a model of them,
    and else the section `optimizer.muon`.
    """

    direction: Function
    """From B matrices (B, R, C), in `optimizer.muon.dtype`, and the options to their updates, of
    the same shape and type. Each follows from its own matrix only. With `state`, the matrices are
    the gradients in fp32, there is a third argument, the state (B, ...) by name, and a second
    result, the new state. With `has_weights`, the last argument is the weights, fp32."""
    scale: Callable[[int, int, Any], float]
    """From R, C and the options to the factor on the update."""
    state: Callable[[int, int], Mapping[str, tuple[int, ...]]] | None = None
    """From R and C to the shapes of the state of a matrix, by name: fp32, and zeros at first. Only
    the rank that computes the matrix's updates keeps it, and saves it. None: Muon's momentum is
    the only state, and the matrices are that."""
    has_weights: bool = False
    """Whether `direction` looks at the weights: then they are brought together at every step."""


def _scale(rows: int, columns: int, config: Muon) -> float:
    """Return the factor of `optimizer.muon.lr_scale`."""
    if config.lr_scale == "spectral":
        return float(max(1.0, rows / columns) ** 0.5)
    return 0.2 * float(max(rows, columns)) ** 0.5


OPTIMIZERS: dict[str, ElementWise | MatrixWise] = {
    "AdamW": ElementWise("meshwright.train.optim.optimizers:build_adamw"),
    "Adam": ElementWise("meshwright.train.optim.optimizers:build_adam"),
    "muon": MatrixWise("meshwright.train.optim.matrices:orthogonalise", _scale),
}

SCHEDULES: dict[str, Function] = {
    "wsd": "meshwright.train.optim.schedules:warmup_stable_decay",
    "inverse_sqrt": "meshwright.train.optim.schedules:inverse_sqrt",
}
"""By name: from a step, counted from 1, the number of steps, and options to the fraction of the
peak learning rate. The options are those of [options.NAME], if the function's module has a model of
them, and else the section `lr_scheduler`."""


def check_schedule(config: JobConfig, own_options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if there is no such schedule, or one of the user's gives no fractions: at
    the first, the middle and the last step."""
    name, steps = config.lr_scheduler.name, config.schedule_steps
    fix = did_you_mean(name, SCHEDULES)
    check(name in SCHEDULES, "lr_scheduler.name", name, "no such schedule", fix)
    function = SCHEDULES[name]
    if isinstance(function, str):  # it is ours
        return
    for step in (1, (steps + 1) // 2, steps):
        try:
            given = (step, steps, own_options.get(name, config.lr_scheduler))
            value, again = function(*given), function(*given)
        except Exception as error:  # whatever the user's function raises
            what = describe_error(error, file_of(function))
            rule = f"its function raises for step {step} of {steps}: {what}"
            raise config_error("lr_scheduler.name", name, rule, "correct it") from None
        # numbers of NumPy are real as well
        is_fraction = isinstance(value, Real) and 0 <= float(value) < math.inf
        rule = f"its function gives {value!r} for step {step} of {steps}"
        fix = "return a fraction of the peak, 0 or more"
        check(is_fraction, "lr_scheduler.name", name, rule, fix)
        rule, fix = f"{rule}, and then {again!r}", "let it follow from its arguments"
        check(value == again, "lr_scheduler.name", name, rule, fix)


FALLBACK = "AdamW"
"""Optimizer of the parameters that a matrix-wise one doesn't take by itself."""


class Settings(NamedTuple):
    """Settings of one parameter."""

    optimizer: str
    lr_scale: float
    """Factor on the job's learning rate."""
    weight_decay: float


def group_of(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """Return the index of the first group with a pattern that matches `name`; None: no group."""
    for index, group in enumerate(groups):
        if any(fnmatchcase(name, pattern) for pattern in group.parameters):
            return index
    return None


def settings_of(name: str, declared: Parameter, config: Optimizer) -> Settings:
    """Return the settings of a parameter with this name in the plain model, `declared` in its
    table: those of its group, or else the optimizer of its role.

    A norm's weight or a bias, of experts too, has no weight decay by default: nothing grows with it
    that decay would bound, and decay would pull a norm's scale to 0. Embeddings have it. So do
    transformers' Trainer, Megatron-LM and nanoGPT; torchtitan decays every parameter, and OLMo 2
    all but the embeddings.
    """
    has_decay = declared.role not in ("norm", "bias") or config.decay_norm_and_bias
    decay = config.weight_decay if has_decay else 0.0
    is_for_all = not isinstance(OPTIMIZERS[config.name], MatrixWise)
    takes_it = is_for_all or declared.role in ("matrix", "experts")
    optimizer = config.name if takes_it else FALLBACK
    index = group_of(name, config.groups)
    if index is None:
        return Settings(optimizer, declared.lr_scale, decay / declared.lr_scale)
    group = config.groups[index]
    own_decay = decay if group.weight_decay is None else group.weight_decay
    return Settings(
        group.optimizer or optimizer,
        group.lr_scale * declared.lr_scale,
        own_decay / declared.lr_scale,
    )


def check_optimizers(config: Optimizer, table: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the name of each parameter's optimizer.

    Raises:
        ConfigError: if there is no such optimizer, or a parameter has none that takes it.
    """
    chosen = {f"optimizer.groups.{i}.optimizer": g.optimizer for i, g in enumerate(config.groups)}
    for key, name in ({"optimizer.name": config.name} | chosen).items():
        is_known = name is None or name in OPTIMIZERS
        if not is_known:
            rule, fix = "no such optimizer", did_you_mean(name or "", OPTIMIZERS)
            raise UnknownNameError(key, str(config_error(key, name, rule, fix)))
    wholes = {name for name, one in OPTIMIZERS.items() if isinstance(one, MatrixWise)}
    if not config.groups and config.name not in wholes:
        return dict.fromkeys(table, config.name)
    found = {name: settings_of(name, one, config).optimizer for name, one in table.items()}
    for name, parameter in table.items():
        number = group_of(name, config.groups)
        is_chosen = number is not None and config.groups[number].optimizer is not None
        check(
            parameter.role is not None or is_chosen or config.name not in wholes,
            "optimizer.name",
            config.name,
            f"{name} of shape {parameter.shape} has no role that tells its optimizer",
            f'add [[optimizer.groups]] with parameters = ["{name}"] and optimizer = "{FALLBACK}"',
        )
        check(
            len(parameter.shape) in (2, 3) or found[name] not in wholes,
            f"optimizer.groups.{number}.optimizer",
            found[name],
            f"is for matrices, and {name} has the shape {parameter.shape}",
            f'match it in an earlier group with optimizer = "{FALLBACK}"',
        )
    used = sorted(wholes.intersection(found.values()))
    check(
        not (used and config.early_step_in_backward),
        "optimizer.early_step_in_backward",
        True,
        f"{', '.join(used)} needs whole matrices of gradients, and ranks have parts at other times",
        "leave it out",
    )
    return found


def has_other_state(
    config: Optimizer, saved: Mapping[str, Any], table: Mapping[str, Parameter]
) -> bool:
    """Return whether a parameter's optimizer looks at whole matrices, and that of the section
    `saved` doesn't, or the other way round: the state of one has no place in the other.

    False for a section of a different version, or optimizers of a module that isn't there.
    """
    try:
        before = check_optimizers(Optimizer.model_validate_json(json.dumps(saved)), table)
    except (ValidationError, ConfigError):
        return False
    kinds = {name: type(one) for name, one in OPTIMIZERS.items()}
    now = check_optimizers(config, table)
    return any(kinds[now[name]] is not kinds[before[name]] for name in table)


def find_names(key: str, pattern: str, names: Sequence[str]) -> set[str]:
    """Return the parameters that a pattern of `key` matches; `ConfigError` if there are none."""
    found = {name for name in names if fnmatchcase(name, pattern)}
    shown = f"{names[0]}, {names[1]}, ..., {names[-1]}"
    check(bool(found), key, pattern, "matches no parameter", f"their names are {shown}")
    return found


def names_by_group(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[set[str]]:
    """Return the names of the parameters in each group.

    Raises:
        ConfigError: if a pattern matches no parameter, or a group gets none because earlier groups
            match all of its.
    """
    chosen = {name: group_of(name, groups) for name in names}
    members = [{name for name in names if chosen[name] == index} for index in range(len(groups))]
    for index, group in enumerate(groups):
        key = f"optimizer.groups.{index}.parameters"
        for pattern in group.parameters:
            find_names(key, pattern, names)
        check(
            bool(members[index]),
            key,
            group.parameters,
            "matches only parameters of the groups before it, and the first match counts",
            "put this group before them",
        )
    return members


def idle_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], frozen: Collection[str]
) -> Iterator[str]:
    """Say which groups have no parameter that is trained."""
    for index, members in enumerate(names_by_group(groups, names)):
        if members.issubset(frozen):
            yield f"optimizer.groups.{index} has no effect: model.frozen has all its parameters"


def fitted_groups(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[ParameterGroup]:
    """Return the groups that match something in a model of fewer parameters, `names`."""
    fitted = []
    for group in groups:
        patterns = [p for p in group.parameters if any(fnmatchcase(name, p) for name in names)]
        fitted.append(group.model_copy(update={"parameters": patterns}))
    used = {group_of(name, fitted) for name in names}
    return [group for index, group in enumerate(fitted) if index in used]


def average_decay(config: JobConfig) -> float | None:
    """Return the share that `checkpoint.average` keeps per step, None without a mean; `ConfigError`
    if a step has more tokens than its window."""
    decay, window = config.checkpoint.average.decay, config.checkpoint.average.window_tokens
    if window is None:
        return decay
    tokens = config.tokens_per_step
    rule, fix = "is no more than the tokens of one step", f"raise it above {tokens}"
    check(window > tokens, "checkpoint.average.window_tokens", window, rule, fix)
    return 1 - tokens / window
