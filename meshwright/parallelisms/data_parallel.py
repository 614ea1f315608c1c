"""FSDP2: parameters, gradients and optimizer states sharded over data-parallel ranks."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from meshwright.models.decoder import Decoder
from meshwright.models.layers.projection import TiedProjection
from meshwright.parallelisms.precision import compute_in_fp32

Reshard = Literal["default", "always", "never"]


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    fp32_modules: Collection[str] = (),
    reshard_after_forward: Reshard,
    prefetch_layers: int = 1,
    enable_cpu_offload: bool = False,
) -> None:
    """Shard `model` in place: each block, the embedding, and the output with the norm before it.

    Gradients come out *summed* over ranks, not averaged: the loss is divided once, by the global
    number of labels (see `step.py`).

    Args:
        model: best on the meta device.
        mesh: (fsdp) or (dp_replicate, fsdp).
        param_dtype: of the gathered parameters, and with them of activations.
        reduce_dtype: in which gradients are summed.
        fp32_modules: names of modules, none within another, that are not cast to `param_dtype` but
            are groups of their own, with casts around them.
        prefetch_layers: layers gathered ahead of the one that computes, at least 1.
        enable_cpu_offload: keep shards on the CPU, where the model must then be given its memory.
    """
    kept = compute_in_fp32(model, fp32_modules, param_dtype)
    # Inputs of a block are in param_dtype as they come: the embedding makes them so. Casting them
    # would also cast the fp32 rotary cache, which is an input of each block.
    low = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    high = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    # pinned, so that copies do not wait; torch pins by way of an accelerator, or raises
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def group(*modules: nn.Module, reshard_after_forward: bool) -> FSDPModule:
        return fully_shard(
            [*modules],
            mesh=mesh,
            mp_policy=high if modules[0] in kept else low,
            offload_policy=offload if enable_cpu_offload else OffloadPolicy(),
            reshard_after_forward=reshard_after_forward,
        )[0]

    layers: list[list[FSDPModule]] = []  # in the order of forward; groups within a block follow it
    never = reshard_after_forward == "never"
    at_end = reshard_after_forward == "always"
    is_tied = isinstance(model.output, TiedProjection)
    if model.tok_embeddings is not None and not is_tied:
        layers.append([group(model.tok_embeddings, reshard_after_forward=not never)])
    *_, last = model.layers.values()
    for block in model.layers.values():
        # backward begins with the last and the output: freed, they would be gathered twice in a row
        reshard = at_end if block is last else not never
        within = [module for module in block.modules() if module in kept and module is not block]
        inner = [group(module, reshard_after_forward=reshard) for module in within]
        layers.append([group(block, reshard_after_forward=reshard), *inner])
    ends = [end for end in (model.norm, model.output) if end is not None]
    if is_tied:
        ends = [end for end in ends if end in kept]
    if kept.intersection(ends):
        layers += [[group(end, reshard_after_forward=at_end)] for end in ends]
    elif ends:
        layers.append([group(*ends, reshard_after_forward=at_end)])
    # a tied embedding, needed at both ends, stays in the root's group
    root = group(model, reshard_after_forward=False)
    if prefetch_layers > 1:  # FSDP2 prefetches one by itself
        _prefetch(root, layers, prefetch_layers)
    if mesh.size() > 1:  # over one rank, the default mean is the sum, and does not divide
        sum_gradients(model)


def _prefetch(root: FSDPModule, layers: Sequence[Sequence[FSDPModule]], ahead: int) -> None:
    """Make each layer gather the next `ahead` of them too, before it computes.

    Args:
        layers: groups of each, in the order of forward, the one around the others first. Without
            `root`, which forward and backward both meet first (a tied embedding is in its group).
    """
    forward = [[root], *layers]
    backward = [[root], *([first, *reversed(within)] for first, *within in reversed(layers))]
    for index in range(len(forward)):
        following = slice(index, index + 1 + ahead)
        first, *gathered = chain.from_iterable(forward[following])
        first.set_modules_to_forward_prefetch(gathered)
        first, *gathered = chain.from_iterable(backward[following])
        first.set_modules_to_backward_prefetch(gathered)


def sum_gradients(model: Decoder) -> None:
    """Make every FSDP group in `model` sum its gradients over ranks, where it would average."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # else FSDP2 pre-multiplies within the collective, which gloo cannot
            module.set_force_sum_reduction_for_comms(True)


def accumulate_in_reduce_dtype(model: nn.Module) -> None:
    """Add gradients that autograd left on gathered parameters to FSDP2's sums in `reduce_dtype`.

    FSDP2 does so itself once a module's inputs have their gradients. Schedules that split backward
    compute those of weights later, and autograd then adds up microbatches in `param_dtype`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Nothing public reaches these sums. If a name is gone, this raises; without it, bf16
            # gradients of several microbatches are rounded after each (errors of 1e-3).
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # not in torch 2.11
            for group in [state._fsdp_param_group] if groups is None else groups:
                for parameter in group.fsdp_params if group is not None else ():
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def forget_forward(model: Decoder) -> None:
    """After forwards of `model` without gradients: free gathered parameters, and leave FSDP2 as a
    backward would, which never comes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if isinstance(model, FSDPModule):
        # FSDP2 notes every forward, to prefetch in backward in reverse order; notes of one that
        # has no backward make the next gather in vain. Only `reset_iter_state` clears them too,
        # which torch 2.11 lacks. If the name is gone, look whether they are still made.
        model._get_fsdp_state()._comm_ctx.post_forward_order.clear()
