"""FSDP2: parameters, gradients and optimizer states sharded over data-parallel ranks."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.config.parallelism import Parallelism
from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.mixture import Experts
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import is_fsdp, local_shard
from meshwright.parallelisms.shared_memory import fsdp_groups, share_memory
from meshwright.system.modules import has_torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def compute_in(model: Decoder, name: str, fp32_modules: Collection[str] = ()) -> str:
    """Make the layers of a whole model on one rank compute in the type `name`, as `apply_fsdp`
    would; return a line for the log."""
    dtype = getattr(torch, name)
    kept = compute_in_fp32(model, fp32_modules, dtype)
    assert model.tok_embeddings is not None
    if model.tok_embeddings not in kept:
        model.tok_embeddings.dtype = dtype  # and all others follow
    return f"one rank without FSDP2: computes in {name}"


def compute_in_fp32(
    model: Decoder, names: Collection[str], param_dtype: torch.dtype
) -> set[nn.Module]:
    """Cast inputs of the modules of these names to fp32, and their outputs to `param_dtype`; return
    the modules. FSDP2 can do so too, but not in torch 2.11 where backward computes them again."""
    modules = {module for name, module in model.named_modules() if name in names}
    for module in modules:  # the loss takes fp32 logits as they are
        _cast_around(module, torch.float32 if module is model.output else param_dtype)
    return modules


def _cast_around(module: nn.Module, output_dtype: torch.dtype) -> None:
    def raise_inputs(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def lower_output(
        module: nn.Module, inputs: tuple[object, ...], output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, Tensor):
            return output.to(output_dtype)
        first, *of_routers = output  # of a layer with experts
        return first.to(output_dtype), *of_routers

    # before the hooks of tensor parallelism, whose collectives are then in fp32 as well; and eager,
    # else a compiled block would have a graph for each
    module.register_forward_pre_hook(torch.compiler.disable(raise_inputs), prepend=True)
    module.register_forward_hook(torch.compiler.disable(lower_output))


def apply_fsdp(
    model: Decoder,
    meshes: Meshes,
    training: Training,
    parallelism: Parallelism,
    fp32_modules: Collection[str] = (),
) -> str:
    """Shard `model` in place: each block, the embedding, and the output with the norm before it.

    Gradients come out *summed* over ranks, not averaged: the loss is divided once, by the global
    number of labels (see `train/trainer.py`). Return a line for the log.

    Args:
        model: best on the meta device. With `training.enable_cpu_offload` its shards are to be
            given their memory on the CPU.
        fp32_modules: names of modules, none within another, that aren't cast to
            `training.mixed_precision_param` but are separate groups, with casts around them.
    """
    mesh = meshes.fsdp
    reshard_after_forward = parallelism.fsdp_reshard_after_forward
    if reshard_after_forward == "default" and meshes.pp.size() > 1:
        reshard_after_forward = "never"  # else every microbatch would gather them again
    param_dtype = getattr(torch, training.mixed_precision_param)
    kept = compute_in_fp32(model, fp32_modules, param_dtype)
    shard = _sharding(model, meshes, training, kept)
    layers: list[list[FSDPModule]] = []  # in the order of forward; groups within a block follow it
    never = reshard_after_forward == "never"
    at_end = reshard_after_forward == "always"
    is_tied = model.table.tie_embeddings
    if model.tok_embeddings is not None and not is_tied:
        embedding = shard(model.tok_embeddings, reshard_after_forward=not never)
        embedding.set_unshard_in_backward(False)  # its gradient needs no weight
        # Nothing is left to gather after it in backward. By itself FSDP2 would gather the last
        # group of the microbatch before, since its last backward comes later (`_accumulate`).
        embedding.set_modules_to_backward_prefetch([embedding])
        layers.append([embedding])
    *_, last = model.layers.values()
    for block in model.layers.values():
        # backward starts with the last and the output: freed, they would be gathered twice in a row
        reshard = at_end if block is last else not never
        within = [module for module in block.modules() if module in kept and module is not block]
        inner = [shard(module, reshard_after_forward=reshard) for module in within]
        layers.append([shard(block, reshard_after_forward=reshard), *inner])
    ends = [end for end in (model.norm, model.output) if end is not None]
    if is_tied:
        ends = [end for end in ends if end in kept]
    if kept.intersection(ends):
        layers += [[shard(end, reshard_after_forward=at_end)] for end in ends]
    elif ends:
        layers.append([shard(*ends, reshard_after_forward=at_end)])
    # a tied embedding, needed at both ends, stays in the root's group
    root = shard(model, reshard_after_forward=False)
    if parallelism.fsdp_prefetch_layers > 1:  # FSDP2 prefetches one by itself
        _prefetch(root, layers, parallelism.fsdp_prefetch_layers)
    used = [mesh] if meshes.experts is None else [mesh, meshes.experts]
    if any(one.size() > 1 for one in used):
        # over one rank, the default mean is the sum, and doesn't divide
        sum_gradients(model)
    if meshes.tp.size() > 1:
        sum_over_tp_in_reduce_dtype(model)
    ahead = parallelism.fsdp_prefetch_layers * max(map(len, layers))
    line = _describe(mesh, training)
    if parallelism.fsdp_cpu_backend == "auto":
        # a list, because each mesh is to share its memory, whether or not the other does
        shared = [share_memory(model, one, ahead) for one in used]
        if any(shared):
            line += "; through shared memory"
    return line


def _sharding(
    model: Decoder, meshes: Meshes, training: Training, kept: Collection[nn.Module]
) -> Callable[..., "FSDPModule"]:
    """Return a function that makes of modules of `model` one group, whose parameters are gathered
    together: sharded over FSDP's mesh; experts, over theirs."""
    from torch.distributed.fsdp import (  # takes 0.8 s, which few single ranks need
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    # Inputs of a block are in the compute type as they come: the embedding makes them so. Casting
    # them would also cast the fp32 rotary cache, which is an input of each block.
    mixed_policy, fp32_policy = (
        MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        )
        for dtype in (getattr(torch, training.mixed_precision_param), torch.float32)
    )
    offload, mesh = OffloadPolicy(), meshes.fsdp
    place = _placement(model, meshes)
    if training.enable_cpu_offload:
        # pinned, so that copies don't wait; torch pins by way of an accelerator, or raises
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    def shard(*modules: nn.Module, reshard_after_forward: bool) -> "FSDPModule":
        return fully_shard(
            [*modules],
            shard_placement_fn=place,
            mesh=mesh,
            mp_policy=fp32_policy if modules[0] in kept else mixed_policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )[0]

    return shard


def _placement(model: Decoder, meshes: Meshes) -> Callable[[nn.Parameter], Any] | None:
    """Return how FSDP2 shards a parameter, if there are experts: theirs by expert, or within
    experts where these are fewer than ranks."""
    modules = [module for module in model.modules() if isinstance(module, Experts)]
    stacked = {parameter for module in modules for parameter in module.parameters()}
    if not stacked:
        return None
    from torch.distributed.tensor import Shard  # with DTensors: 0.4 s

    size = (meshes.experts or meshes.fsdp).size(-1)
    info: Any = None
    if meshes.experts is not None:
        # Private names of a documented argument (2.13): if they move, every job whose experts have
        # a separate mesh stops here.
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        info = _get_mesh_info(meshes.experts)

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in stacked:
            return None
        is_within = len(local_shard(parameter)) < size and parameter.shape[1] % size == 0
        placement = Shard(1) if is_within else None
        return placement if info is None else ShardPlacementResult(placement, info)

    return place


def _describe(mesh: DeviceMesh, training: Training) -> str:
    shards = mesh.size(-1)
    placed = f"sharded over {shards} ranks" if shards > 1 else "not sharded"
    parts = [f"FSDP2: parameters {placed}"]
    if mesh.ndim > 1:
        parts[0] += f", {mesh.size(0)} replicas"
    parts.append(f"computes in {training.mixed_precision_param}")
    if mesh.size() > 1:
        parts[1] += f", reduces in {training.mixed_precision_reduce}"
    if training.enable_cpu_offload:
        parts.append("shards in host memory")
    return "; ".join(parts)


def _prefetch(root: "FSDPModule", layers: Sequence[Sequence["FSDPModule"]], ahead: int) -> None:
    """Make each layer gather the next `ahead` of them too, before it computes.

    `layers` has the groups of each, the one around the others first, without `root`, which forward
    and backward both meet first (a tied embedding is in its group).
    """
    forward = [[root], *layers]
    backward = [[root], *([first, *reversed(within)] for first, *within in reversed(layers))]
    for index in range(len(forward)):
        following = slice(index, index + 1 + ahead)
        first, *gathered = chain.from_iterable(forward[following])
        first.set_modules_to_forward_prefetch(gathered)
        first, *gathered = chain.from_iterable(backward[following])
        first.set_modules_to_backward_prefetch(gathered or [first])  # without any, one by itself


def sum_gradients(model: Decoder) -> None:
    """Make every FSDP group in `model` sum its gradients over ranks, where it would average."""
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            # else FSDP2 pre-multiplies within the collective, which gloo can't
            module.set_force_sum_reduction_for_comms(True)


def accumulate_in_reduce_dtype(model: nn.Module) -> None:
    """Add gradients that autograd left on gathered parameters to FSDP2's sums in `reduce_dtype`.

    FSDP2 does so itself once a module's inputs have their gradients. Schedules that split backward
    compute weight gradients later, and autograd then adds up microbatches in `param_dtype`. From
    torch 2.15 on, FSDP2 has autograd itself add them up in `reduce_dtype` (`Tensor.grad_dtype`).
    """
    if has_torch(2, 15):
        return
    for group in fsdp_groups(model):
        _accumulate(group)


def sum_over_tp_in_reduce_dtype(model: nn.Module) -> None:
    """Have gradients of parameters that tensor parallelism replicates summed in `reduce_dtype`.

    Of a norm or a router each rank has the gradient of its tokens. FSDP2 sums these over tp
    before it reduces over its own mesh, and up to torch 2.14 in the type they were computed in
    (pytorch issue 190626). All gradients of a group are cast, because it takes one type.
    """
    if has_torch(2, 15):
        return

    def cast_before(group: Any) -> Callable[..., None]:
        # Nothing public comes between the last gradient and the sum. If the name is gone, this
        # raises. Gradients have been cast by FSDP2 already if it has added up microbatches.
        post_backward = group.post_backward

        def cast_then_reduce(*unused: object) -> None:
            _accumulate(group)
            post_backward(*unused)

        return cast_then_reduce

    for group in fsdp_groups(model):
        group.post_backward = cast_before(group)


def _accumulate(group: Any) -> None:
    """Add the gradients that autograd left in a group of FSDP2's to its sums in `reduce_dtype`."""
    # Nothing public reaches these sums. If a name is gone, this raises; without it, bf16 gradients
    # of several microbatches are rounded after each (errors of 1e-3).
    for parameter in group.fsdp_params:
        if hasattr(parameter, "unsharded_param"):  # from the group's first forward on
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reset_after_no_grad(stages: Iterable[Decoder]) -> None:
    """After forwards of `stages` without gradients: free gathered parameters, and leave FSDP2 as a
    backward would, which never comes."""
    for module in chain.from_iterable(stage.modules() for stage in stages):
        if is_fsdp(module):
            module.reshard()
            # FSDP2 notes every forward, to prefetch in backward in reverse order; notes of one that
            # has no backward make the next gather in vain. Only `reset_iter_state` clears them too,
            # which torch 2.11 lacks. If the name is gone, look whether they are still made.
            module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
