"""Activation checkpointing: activations that backward computes again instead of keeping them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as partitioner
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.config.parallelism import SAVED_OPS, ActivationCheckpoint
from meshwright.models.mixture import Mixture
from meshwright.system.errors import check

Operator = Callable[..., Any]
"""Of torch.ops: one overload, or an operator of higher order, which has none."""

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
MESHES_HAVE_NO_SIZE = "unsafe_treat_script_objects_as_zero_size"
"""Option of torch.compile, there in torch 2.13, not in 2.11: without it the compiler can't
tell what memory a mesh takes."""

KEPT = ("meshwright.choose_experts", "meshwright.exchange_counts")
"""Operators whose results are kept in any mode: chosen again, experts might be others."""

KEPT_BESIDE_MESHES = ("aten._scaled_dot_product_flash_attention_for_cpu",)
"""Kept in compiled blocks that have device meshes among their inputs, on CPUs. torch takes
attention for random and saves a state of the generator for each that it computes again. Version
2.13 puts this state behind the meshes, then takes a mesh for a tensor and fails."""


def apply_ac(
    blocks: nn.ModuleDict, options: ActivationCheckpoint, kept: tuple[str, ...] = ()
) -> str:
    """Wrap the forward of `blocks` in place; names of modules and parameters stay as they are.

    With mode "memory_budget" it does nothing: the compiler recomputes, see `keep_within_budget`.
    Return a line for the log.

    Args:
        blocks: of the model or of a stage, by their number in the model. With mode "selective" and
            a number, every n-th is counted from the model's first whatever the stage.
        kept: operators whose results are kept in any mode, in addition to `KEPT`.
    """
    mode, selection = options.mode, options.selective_ac_option
    for number, block in blocks.items():
        has_experts = any(isinstance(part, Mixture) for part in block.modules())
        names = (*kept, *(KEPT if has_experts else ()))
        if mode == "selective" and selection == "op":
            names = tuple(dict.fromkeys([*names, *options.saved_ops]))
        elif mode != "full" and (mode != "selective" or int(number) % int(selection) > 0):
            continue
        _recompute(block, **{"context_fn": _keeping(names)} if names else {})
    detail = {"selective": f" ({selection})", "memory_budget": f" ({options.memory_budget:g})"}
    return f"activation checkpointing: {mode}{detail.get(mode, '')}"


@functools.cache  # the compiler takes equal graphs with a different backend for others
def keep_within_budget(backend: str, memory_budget: float, has_meshes: bool = False) -> Backend:
    """Return the compiler `backend`, keeping this share, in [0, 1], of the activations it would
    keep.

    Args:
        has_meshes: graphs have device meshes among their inputs, as under tensor parallelism.

    Raises:
        ConfigError: if torch can't tell what memory a mesh takes.
    """
    check(
        not has_meshes or hasattr(partitioner, MESHES_HAVE_NO_SIZE),
        "activation_checkpoint.mode",
        "memory_budget",
        f"torch {torch.__version__} cannot with tensor parallelism",
        "use torch 2.13, or a different mode",
    )
    # with our operators, as the CPU's attention, which were else free to compute again
    options: dict[str, object] = {
        "activation_memory_budget": memory_budget,
        "is_non_builtin_to_include": True,
    }
    if has_meshes:
        options[MESHES_HAVE_NO_SIZE] = True
    from torch._dynamo import lookup_backend  # takes 0.8 s, in vain where nothing is compiled

    compile_graph = lookup_backend(backend)

    def compile_within_budget(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with partitioner.patch(options):
            return compile_graph(graph, inputs)

    return compile_within_budget


@functools.cache  # blocks with the same function share a compiled graph
def _keeping(names: tuple[str, ...]) -> Callable[[], object]:
    """Return the `context_fn` of `checkpoint` that keeps outputs of these operators."""
    # names, and not their operators, some of which torch.compile doesn't know
    contexts = functools.partial(_contexts, names)
    # by this torch.compile's cache tells policies apart; without it, it keeps no graph
    contexts.cache_hash = f"save {names}, prefer to compute others again"  # type: ignore[attr-defined]
    return contexts


def _contexts(names: tuple[str, ...]) -> object:
    saved = _operators(names)

    # a function and not a list: 2.13 takes operators of higher order in one, older torch may not
    def policy(_: object, operator: Operator, *__: object, **___: object) -> CheckpointPolicy:
        is_saved = operator in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def _operators(names: tuple[str, ...]) -> frozenset[Operator]:
    return frozenset(find_ops(names))


def find_ops(names: Sequence[str]) -> list[Operator]:
    """Return every overload of the operators that `activation_checkpoint.saved_ops` names.

    Raises:
        ConfigError: if torch has no such operator; the default ones it may lack.
    """
    found: list[Operator] = []
    for name in names:
        namespace, _, operator = name.partition(".")
        packet: Any = getattr(getattr(torch.ops, namespace), operator, None)
        has_overloads = hasattr(packet, "overloads")
        check(
            has_overloads
            or (namespace == "higher_order" and callable(packet))
            or name in SAVED_OPS,
            "activation_checkpoint.saved_ops",
            name,
            f"torch {torch.__version__} has no such operator",
            'names are those of torch.ops, like "aten.mm"',
        )
        if has_overloads:
            found += [getattr(packet, overload) for overload in packet.overloads()]
        elif packet is not None:
            found.append(packet)
    return found


DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Modules that draw random numbers, if their `p` is above 0. No family has them; a user's part
may."""


def _recompute(block: nn.Module, **options: Any) -> None:
    forward = block.forward
    draws = any(isinstance(part, DROPOUTS) and part.p > 0 for part in block.modules())

    # our function, not a partial: torch.compile starts at the first frame that isn't torch's
    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=draws,  # or backward would compute with other masks
            **options,
        )

    block.forward = recomputed
