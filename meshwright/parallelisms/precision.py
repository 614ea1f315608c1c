"""The type in which modules compute."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from meshwright.models.decoder import Decoder


def compute_in(model: Decoder, name: str, fp32_modules: Collection[str] = ()) -> str:
    """Make the layers of a whole model on one rank compute in a type, as `apply_fsdp` would.

    Args:
        name: of the type, e.g. "bfloat16".
        fp32_modules: as `apply_fsdp` takes them.

    Returns:
        A line for the log.
    """
    dtype = getattr(torch, name)
    kept = compute_in_fp32(model, fp32_modules, dtype)
    assert model.tok_embeddings is not None
    if model.tok_embeddings not in kept:
        model.tok_embeddings.dtype = dtype  # and all others follow
    return f"one rank without FSDP2: computes in {name}"


def compute_in_fp32(
    model: Decoder, names: Collection[str], param_dtype: torch.dtype
) -> set[nn.Module]:
    """Cast inputs of the modules of these names to fp32, and their outputs to `param_dtype`.

    FSDP2 can do so too, but not in torch 2.11 where backward computes the module again.

    Returns:
        the modules.
    """
    modules = {module for name, module in model.named_modules() if name in names}
    for module in modules:  # the loss takes fp32 logits as they are
        _cast_around(module, torch.float32 if module is model.output else param_dtype)
    return modules


def _cast_around(module: nn.Module, output_dtype: torch.dtype) -> None:

    def raise_inputs(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def lower_output(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        return output.to(output_dtype)

    # before the hooks of tensor parallelism, whose collectives are then in fp32, too; and eager,
    # else a compiled block would have a graph for each
    module.register_forward_pre_hook(torch.compiler.disable(raise_inputs), prepend=True)
    module.register_forward_hook(torch.compiler.disable(lower_output))
