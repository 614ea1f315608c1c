"""Compares a model's table with the parameters that its modules hold: a model of the user's may
declare what no module has, or the other way round."""

import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Block, build_block
from meshwright.models.layers import build_part
from meshwright.models.parameter import Cut, Layout, Parameter
from meshwright.models.table import AttentionSpec, DecoderSpec, LayerSpec

OF_LINEAR = ("colwise", "colwise_gathered", "rowwise")
"""Layouts that tensor parallelism gives to matrix products."""


class TableError(Exception):
    """A model's table is wrong, or isn't that of its modules; the text says where."""


def check_modules(args: DecoderArgs) -> None:
    """Make the table, build each kind of layer, and the last norm, on meta, and compare them; run
    the user's own modules there.

    Raises:
        TableError: with the name of the first parameter that differs or can't be sharded, or of the
            first field or module that is wrong.
        Exception: whatever the user's code raises.
    """
    table = args.table
    if not isinstance(table, DecoderSpec):
        raise TableError(f"its `expand` returns {table!r:.60}, and no DecoderSpec")
    for layer in dict.fromkeys(table.layers):
        number = table.layers.index(layer)
        for part in (layer, layer.attention, layer.feed_forward):
            _check_values(f"layer {number}", part)
        for name, own in layer.modules.items():
            if not isinstance(own, Mapping):
                raise TableError(f"the parameters of layers.{number}.{name} are {own!r:.60}")
        with torch.device("meta"):
            block = build_block(layer)
        declared = {
            f"{module}.{name}": parameter
            for module, own in layer.modules.items()
            for name, parameter in own.items()
        }
        _compare(f"layers.{number}.", declared, block)
        for bare in layer.attention.bare_modules:
            if not isinstance(getattr(block.attention, bare, None), nn.Module):
                raise TableError(f"its attention has no module {bare!r}, which the table declares")
        _run(f"layers.{number}.", layer, block)
    for name, parameter in table.parameters.items():
        for key in parameter.parts[0].split(" * ") if parameter.parts else ():
            if not hasattr(args, key):
                rule = f"and model.args has no {key!r}"
                raise TableError(f"{name} has parts = {parameter.parts!r}, {rule}")
    with torch.device("meta"):
        norm: nn.Module = build_part(table.norm_spec)
    _compare("norm.", table.norm_spec.parameters, norm)


def _check_values(place: str, spec: Any) -> None:
    """Check the fields of a spec that take one of some values: any other would do nothing."""
    kind = type(spec).__name__
    # hints of the user's own classes may name what only a type checker imports
    ours = next((one for one in type(spec).__mro__ if _is_ours(one)), object)
    for name, hint in get_type_hints(ours).items():
        choices, value = _choices(hint), getattr(spec, name, None)
        if choices and value not in choices:
            known = ", ".join(map(repr, choices))
            raise TableError(f"{place}: {kind} has {name} = {value!r}, which is none of {known}")
    biases = getattr(spec, "biases", ())
    for name in biases if isinstance(spec, AttentionSpec) else ():
        if f"{name}.bias" not in spec.parameters:
            raise TableError(f"{place}: {kind} has biases = {biases!r}, and no {name}.bias")


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a type lists, as `Literal["a"] | None` does; (): it lists none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, UnionType):
        return (None,) if hint is type(None) else ()
    parts = [_choices(part) for part in get_args(hint)]
    return tuple(one for part in parts for one in part) if all(parts) else ()


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(("meshwright.", "torch."))


TOKENS = 4
"""That modules are run with."""

NEEDS_NUMBERS = re.compile(r"(\b|_)meta\b|Triton", re.IGNORECASE)
"""In errors of operations that need numbers or a GPU, and so can't be tried here: of torch on meta,
and of Triton's kernels. Were the words to change, modules with such operations would be rejected:
the test of them fails then."""


def _run(prefix: str, layer: LayerSpec, block: Block) -> None:
    """Run the user's modules of a layer on meta: what they make must be as what they are given."""
    spec = layer.attention
    x = torch.empty(1, TOKENS, spec.dim, device="meta")
    half = x.new_empty(TOKENS, spec.rope.head_dim // 2) if spec.rope else None
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
    inputs: dict[str, tuple[Any, ...]] = {name: (x,) for name, _ in block.named_children()}
    if isinstance(spec, AttentionSpec):
        inputs["attention"] = (x, half, half, mask if spec.has_own_core else None)
    else:  # linear attention takes documents
        del inputs["attention"]
    for name, given in inputs.items():
        module = block.get_submodule(name)
        if _is_ours(type(module)):
            continue
        try:
            made = module(*given)
        except Exception as error:
            if NEEDS_NUMBERS.search(str(error)):
                continue
            raise
        if not isinstance(made, Tensor) or made.shape != x.shape:
            shown = tuple(made.shape) if isinstance(made, Tensor) else repr(made)[:40]
            rule = f"makes {shown} of {tuple(x.shape)}, and the same shape is needed"
            raise TableError(f"{prefix}{name} {rule}")


def _compare(prefix: str, declared: Mapping[str, Parameter], module: nn.Module) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= {name: tuple(state.shape) for name, state in _state(module).items()}
    for name in dict.fromkeys([*declared, *shapes]):
        if name not in shapes:
            raise TableError(f"the table declares {prefix}{name}, which no module holds")
        if name not in declared:
            raise TableError(f"a module holds {prefix}{name}, which the table doesn't declare")
        if shapes[name] != declared[name].shape:
            rule = f"{declared[name].shape} in the table and {shapes[name]} in its module"
            raise TableError(f"{prefix}{name} has the shape {rule}")
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
            raise TableError(f"{name} has the layout {layout!r}, which is none of {known} and Cut")
        if layout in OF_LINEAR and not isinstance(holder, nn.Linear):
            kind = type(holder).__name__
            raise TableError(
                f"{name} has the layout {layout!r}, which is of torch.nn.Linear, and its module is "
                f"a {kind}: use Cut"
            )
        return
    if name.count(".") < 4:  # as layers.3.attention.mix.weight
        raise TableError(
            f"{name} has the layout Cut, so it must belong to a module inside of attention or of "
            "the feed-forward"
        )
    if not 0 <= layout.dim < len(parameter.shape):
        raise TableError(
            f"{name} of shape {parameter.shape} can't be sharded along dimension {layout.dim}"
        )
    if parts is None or parameter.shape[layout.dim] % parts[1]:
        raise TableError(
            f"{name} is sharded along a dimension of {parameter.shape[layout.dim]}: give it "
            "`parts`, a key of model.args and a number that divides it"
        )
