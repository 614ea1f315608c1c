"""The order in which a model is made parallel."""

from collections.abc import Collection, Sequence

import torch

from meshwright.config.job_config import SAVED_OPS
from meshwright.models.decoder import Decoder
from meshwright.parallelisms import (
    activation_checkpoint,
    context_parallel,
    data_parallel,
    precision,
    ring_attention,
    tensor_parallel,
)
from meshwright.parallelisms.meshes import Meshes


def parallelize(
    model: Decoder,
    meshes: Meshes,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    fp32_modules: Collection[str] = (),
    reshard_after_forward: data_parallel.Reshard = "default",
    prefetch_layers: int = 1,
    enable_cpu_offload: bool = False,
    loss_chunk_tokens: int = 0,
    enable_async_tensor_parallel: bool = False,
    context_parallel_attention: context_parallel.Attention = "auto",
    ac_mode: activation_checkpoint.Mode = "none",
    selective_ac_option: str = "op",
    saved_ops: Sequence[str] = SAVED_OPS,
    memory_budget: float = 0.5,
    compile_backend: str | None = None,
) -> None:
    """Wrap and shard `model` in place, best while it is on the meta device. The order is fixed:

    1. Tensor parallelism first, because its plan finds submodules by their plain names, those of
       the model's table.
    2. Context parallelism, inside of every wrapper of a block.
    3. Activation checkpointing before compile, so that the compiler sees the recomputation.
    4. Compile block by block, so that one graph serves every layer; and the loss.
    5. FSDP last, so that its hooks surround the compiled blocks; on a single rank too if parameters
       are offloaded, or gradients are not added up in their own type, fp32. Otherwise it would
       only copy: layers cast their weights themselves.
    """
    if meshes.tp.size() > 1:
        tensor_parallel.apply_tp(model, meshes.tp)
        if enable_async_tensor_parallel:
            tensor_parallel.enable_async_tp(meshes.tp)
    if meshes.cp.size() > 1:
        device_type, head_dim = meshes.cp.device_type, model.table.rope.head_dim
        has_kernel = ring_attention.is_available(device_type, param_dtype, head_dim)
        goes_around = context_parallel.is_ring(
            context_parallel_attention, device_type, is_available=has_kernel
        )
        context_parallel.apply_cp(model, meshes.cp, goes_around=goes_around, has_kernel=has_kernel)
    activation_checkpoint.apply_ac(
        model.layers,
        ac_mode,
        selective_ac_option=selective_ac_option,
        saved_ops=saved_ops,
    )
    if model.output is not None:
        model.output.loss.chunk_tokens = loss_chunk_tokens
    if compile_backend is not None:
        backend: str | activation_checkpoint.Backend = compile_backend
        if ac_mode == "memory_budget":
            backend = activation_checkpoint.keep_within_budget(
                compile_backend, memory_budget, has_meshes=meshes.tp.size() > 1
            )
        for block in model.layers.values():
            block.compile(fullgraph=True, backend=backend)
        if model.output is not None:
            model.output.loss.compile(compile_backend)  # which keeps nothing for backward
    if reshard_after_forward == "default" and meshes.pp.size() > 1:
        reshard_after_forward = "never"  # else every microbatch would gather them again
    weights_and_sums = {reduce_dtype, *(parameter.dtype for parameter in model.parameters())}
    adds_up_in_fp32 = param_dtype == torch.float32 or weights_and_sums == {torch.float32}
    if meshes.world.size() == 1 and adds_up_in_fp32 and not enable_cpu_offload:
        precision.compute_in(model, param_dtype, fp32_modules)
    else:
        data_parallel.apply_fsdp(
            model,
            meshes.fsdp,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            fp32_modules=fp32_modules,
            reshard_after_forward=reshard_after_forward,
            prefetch_layers=prefetch_layers,
            enable_cpu_offload=enable_cpu_offload,
        )
