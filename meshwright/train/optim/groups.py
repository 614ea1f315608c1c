"""Learning rate and weight decay of each parameter, by its name. Free of torch."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from meshwright.config.training import Optimizer, ParameterGroup
from meshwright.system.errors import check


class Settings(NamedTuple):
    """Settings of one parameter."""

    lr_scale: float
    """Factor on the job's learning rate."""
    weight_decay: float


def group_of(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """Return the index of the first group with a pattern that matches `name`; None: no group."""
    for index, group in enumerate(groups):
        if any(fnmatchcase(name, pattern) for pattern in group.parameters):
            return index
    return None


def settings_of(name: str, num_dims: int, config: Optimizer) -> Settings:
    """Return the settings of a parameter with this name in the plain model.

    A parameter of one dimension (a norm's weight, a bias) has no weight decay by default: nothing
    grows with it that decay would bound, and decay would pull a norm's scale to 0. Embeddings have
    it. So do transformers' Trainer, Megatron-LM and nanoGPT; torchtitan decays every parameter, and
    OLMo 2 all but the embeddings.

    Args:
        num_dims: of the whole parameter.
    """
    has_decay = num_dims > 1 or config.decay_norm_and_bias
    decay = config.weight_decay if has_decay else 0.0
    index = group_of(name, config.groups)
    if index is None:
        return Settings(1.0, decay)
    group = config.groups[index]
    return Settings(group.lr_scale, decay if group.weight_decay is None else group.weight_decay)


def find_names(key: str, pattern: str, names: Sequence[str]) -> set[str]:
    """Return the parameters that a pattern of `key` matches.

    Raises:
        ConfigError: if there are none.
    """
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
    members: list[set[str]] = [set() for _ in groups]
    for name in names:
        index = group_of(name, groups)
        if index is not None:
            members[index].add(name)
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


def describe(config: Optimizer, num_dims: Mapping[str, int], frozen: Iterable[str] = ()) -> str:
    """Say how many parameters are trained with which settings.

    Args:
        num_dims: dimensions of every parameter of the model, by name.
    """
    left_out = set(frozen)
    counts = Counter(
        settings_of(name, dims, config) for name, dims in num_dims.items() if name not in left_out
    )
    parts = []
    for (lr_scale, weight_decay), count in counts.items():
        scale = f", lr x {lr_scale:g}" if lr_scale != 1 else ""
        parts.append(f"{count} parameters with weight decay {weight_decay:g}{scale}")
    return f"{config.name}: {'; '.join(parts)}"
