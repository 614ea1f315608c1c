"""Compares a model's table with the parameters that its modules hold: a model of the user's may
declare what no module has, or the other way round."""

from collections.abc import Mapping
from typing import get_args

import torch
from torch import nn

from meshwright.models.decoder import build_block
from meshwright.models.layers import build_part
from meshwright.models.parameter import Cut, Layout, Parameter
from meshwright.models.table import DecoderSpec

OF_LINEAR = ("colwise", "colwise_gathered", "rowwise")
"""Layouts that tensor parallelism gives to matrix products."""


def check_modules(table: DecoderSpec) -> None:
    """Build each kind of layer, and the last norm, on meta, and compare them with the table.

    Raises:
        ValueError: with the name of the first parameter that differs, or can't be sharded.
        Exception: whatever the user's code raises.
    """
    for layer in dict.fromkeys(table.layers):
        with torch.device("meta"):
            block = build_block(layer)
        declared = {
            f"{module}.{name}": parameter
            for module, own in layer.modules.items()
            for name, parameter in own.items()
        }
        _compare(f"layers.{table.layers.index(layer)}.", declared, block)
        for bare in layer.attention.bare_modules:
            if not isinstance(getattr(block.attention, bare, None), nn.Module):
                raise ValueError(f"its attention has no module {bare!r}, which the table declares")
    with torch.device("meta"):
        norm: nn.Module = build_part(table.norm_spec)
    _compare("norm.", table.norm_spec.parameters, norm)


def _compare(prefix: str, declared: Mapping[str, Parameter], module: nn.Module) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= {name: tuple(state.shape) for name, state in _state(module).items()}
    for name in dict.fromkeys([*declared, *shapes]):
        if name not in shapes:
            raise ValueError(f"the table declares {prefix}{name}, which no module holds")
        if name not in declared:
            raise ValueError(f"a module holds {prefix}{name}, which the table doesn't declare")
        if shapes[name] != declared[name].shape:
            rule = f"{declared[name].shape} in the table and {shapes[name]} in its module"
            raise ValueError(f"{prefix}{name} has the shape {rule}")
        holder = module.get_submodule(name.rpartition(".")[0])
        _check_layout(prefix + name, declared[name], holder)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return persistent buffers, but the experts'."""
    owners = dict(module.named_modules())
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in module.state_dict()
        and not type(owners[name.rpartition(".")[0]]).__module__.startswith("meshwright.")
    }


def _check_layout(name: str, parameter: Parameter, holder: nn.Module) -> None:
    layout, parts = parameter.layout, parameter.parts
    if not isinstance(layout, Cut):
        if layout not in get_args(Layout):
            known = ", ".join(get_args(Layout))
            raise ValueError(f"{name} has the layout {layout!r}, which is none of {known} and Cut")
        if layout in OF_LINEAR and not isinstance(holder, nn.Linear):
            kind = type(holder).__name__
            raise ValueError(
                f"{name} has the layout {layout!r}, which is of torch.nn.Linear, and its module is "
                f"a {kind}: use Cut"
            )
        return
    if name.count(".") < 4:  # as layers.3.attention.mix.weight
        raise ValueError(
            f"{name} has the layout Cut, so it must belong to a module inside of attention or of "
            "the feed-forward"
        )
    if not 0 <= layout.dim < len(parameter.shape):
        raise ValueError(
            f"{name} of shape {parameter.shape} can't be sharded along dimension {layout.dim}"
        )
    if parts is None or parameter.shape[layout.dim] % parts[1]:
        raise ValueError(
            f"{name} is sharded along a dimension of {parameter.shape[layout.dim]}: give it "
            "`parts`, a key of model.args and a number that divides it"
        )
