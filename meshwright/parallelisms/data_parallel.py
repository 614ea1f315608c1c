"""FSDP2: parameters, gradients and optimizer states sharded over data-parallel ranks."""

from collections.abc import Sequence
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

Reshard = Literal["default", "always", "never"]


def apply_fsdp(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: Reshard,
    prefetch_layers: int = 1,
    enable_cpu_offload: bool = False,
) -> None:
    """Shard `model` in place: each block, the embedding, and the output with the norm before it.

    Gradients come out *summed* over ranks, not averaged: the loss is divided once, by the global
    number of labels (see `loss.py`).

    Args:
        model: best on the meta device.
        mesh: (fsdp) or (dp_replicate, fsdp).
        param_dtype: of the gathered parameters, and with them of activations.
        reduce_dtype: in which gradients are summed.
        prefetch_layers: groups gathered ahead of the one that computes, at least 1.
        enable_cpu_offload: keep shards on the CPU, where the model must then be given its memory.
    """
    # Inputs of a block are in param_dtype as they come: the embedding makes them so. Casting them
    # would also cast the fp32 rotary cache, which is an input of each block.
    precision = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )

    # pinned, so that copies do not wait; torch pins by way of an accelerator, or raises
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(*modules: nn.Module, reshard_after_forward: bool) -> FSDPModule:
        return fully_shard(
            [*modules],
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload if enable_cpu_offload else OffloadPolicy(),
            reshard_after_forward=reshard_after_forward,
        )[0]

    never = reshard_after_forward == "never"
    is_tied = isinstance(model.output, TiedProjection)
    groups: list[FSDPModule] = []  # in the order of forward
    if model.tok_embeddings is not None and not is_tied:
        groups.append(shard(model.tok_embeddings, reshard_after_forward=not never))
    *blocks, last = model.layers.values()
    for block in blocks:
        groups.append(shard(block, reshard_after_forward=not never))
    # backward begins with these two: freed, they would be gathered twice in a row
    at_end = reshard_after_forward == "always"
    groups.append(shard(last, reshard_after_forward=at_end))
    if model.norm is not None and model.output is not None and not is_tied:
        groups.append(shard(model.norm, model.output, reshard_after_forward=at_end))
    # a tied embedding, needed at both ends, stays here
    root = shard(model, reshard_after_forward=False)
    if prefetch_layers > 1:  # one is what FSDP2 does by itself
        _prefetch(root, groups, prefetch_layers)
    if mesh.size() > 1:  # over one rank, the default mean is the sum, and does not divide
        sum_gradients(model)


def _prefetch(root: FSDPModule, groups: Sequence[FSDPModule], ahead: int) -> None:
    """Make each group gather the next `ahead` of them too, before it computes.

    Args:
        groups: in the order of forward, without `root`, which forward and backward both meet first
            (a tied embedding is in its group).
    """
    forward, backward = [root, *groups], [root, *reversed(groups)]
    for index in range(len(forward)):
        following = slice(index + 1, index + 1 + ahead)
        forward[index].set_modules_to_forward_prefetch(forward[following])
        backward[index].set_modules_to_backward_prefetch(backward[following])


def sum_gradients(model: Decoder) -> None:
    """Make every FSDP group in `model` sum its gradients over ranks, where it would average."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # else FSDP2 pre-multiplies within the collective, which gloo cannot
            module.set_force_sum_reduction_for_comms(True)
