"""The order in which a model is made parallel."""

from collections.abc import Collection

import torch

from meshwright.config.conditions import (
    is_compiled,
    needs_fsdp_alone,
    wants_cpu_attention,
    wants_cpu_products,
)
from meshwright.config.job_config import (
    ActivationCheckpoint,
    Compile,
    Float8,
    Parallelism,
    Training,
)
from meshwright.models.decoder import Decoder
from meshwright.models.layers import cpu_attention
from meshwright.models.layers.attention import CausalAttention
from meshwright.native import onednn_products
from meshwright.parallelisms import (
    activation_checkpoint,
    context_parallel,
    data_parallel,
    float8,
    precision,
)
from meshwright.parallelisms.compile_cache import tell_code_apart
from meshwright.parallelisms.meshes import Meshes


def parallelize(
    model: Decoder,
    meshes: Meshes,
    *,
    training: Training,
    parallelism: Parallelism,
    recomputation: ActivationCheckpoint,
    compilation: Compile,
    float8_options: Float8,
    fp32_modules: Collection[str] = (),
    float8_layers: Collection[str] = (),
) -> list[str]:
    """Wrap and shard `model` in place, best while it is on the meta device. The order is fixed:

    0. Float8 layers, which take the place of others under the same names.
    1. Tensor parallelism first, because its plan finds submodules by their plain names, those of
       the model's table.
    2. Context parallelism, inside of every wrapper of a block.
    3. Activation checkpointing before compile, so that the compiler sees the recomputation.
    4. Compile block by block, so that one graph serves every layer; and the loss. On CPUs, the
       kernel of attention, too, and the library of products.
    5. FSDP last, so that its hooks surround the compiled blocks; on a single rank too if it has to
       offload or to add gradients up. Otherwise it would only copy: layers cast their own weights.

    Args:
        fp32_modules: as `apply_fsdp` takes them.
        float8_layers: as `apply_float8` takes them, if `float8_options.enable`.

    Returns:
        A line for the log about each step that was applied.
    """
    applied: list[str] = []
    if float8_options.enable:
        applied.append(float8.apply_float8(model, float8_layers, float8_options))
    if meshes.tp.size() > 1:
        from meshwright.parallelisms import tensor_parallel  # with DTensors: 0.4 s

        applied.append(tensor_parallel.apply_tp(model, meshes.tp))
        if parallelism.enable_async_tensor_parallel:
            applied.append(tensor_parallel.enable_async_tp(meshes.tp))
    if meshes.cp.size() > 1:
        applied.append(context_parallel.apply_cp(model, meshes.cp, training, parallelism))
    if recomputation.mode != "none":
        applied.append(activation_checkpoint.apply_ac(model.layers, recomputation))
    if model.output is not None:
        model.output.loss.chunk_tokens = training.loss_chunk_tokens
    is_on_cpu = meshes.world.device_type == "cpu"
    if is_on_cpu and wants_cpu_products(compilation, training):
        applied.append(_multiply_by_onednn())
    else:
        onednn_products.take(False)
    if is_compiled(compilation):
        if is_on_cpu and wants_cpu_attention(compilation, training, parallelism):
            applied.append(_use_cpu_kernel(model, training.mixed_precision_param))
        has_meshes = meshes.tp.size() > 1
        casts = float8_options.enable and float8_options.recipe_name == "rowwise"
        applied.append(
            _compile(
                model, compilation.backend, recomputation, has_meshes=has_meshes, keeps_casts=casts
            )
        )
    if meshes.world.size() == 1 and not needs_fsdp_alone(training, float8_options):
        applied.append(precision.compute_in(model, training.mixed_precision_param, fp32_modules))
    else:
        applied.append(data_parallel.apply_fsdp(model, meshes, training, parallelism, fp32_modules))
    return applied


def _multiply_by_onednn() -> str:
    """Have oneDNN multiply, if that is faster on this machine."""
    if reason := onednn_products.why_not():
        return f"products in float32: torch's, since {reason}"
    onednn_products.take(True)
    return "products in float32: oneDNN's"


def _use_cpu_kernel(model: Decoder, dtype: str) -> str:
    """Give attention its kernel in C++, if this machine has it."""
    if reason := cpu_attention.why_not(model.table.head_dim, getattr(torch, dtype)):
        return f"attention: torch's, since {reason}"
    for block in model.layers.values():
        core = block.get_submodule("attention.core")
        assert isinstance(core, CausalAttention)
        core.has_cpu_kernel = True
    return f"attention: {cpu_attention.SOURCE.name}"


def _compile(
    model: Decoder,
    name: str,
    recomputation: ActivationCheckpoint,
    *,
    has_meshes: bool,
    keeps_casts: bool,
) -> str:
    """Compile every block and the loss by the backend of that name.

    Args:
        keeps_casts: inductor rounds to bf16 wherever eager blocks do. Otherwise a norm and the
            scales of its rows may come from different numbers: with rowwise float8 losses became
            NaN on GPUs (pytorch issue 150859).
    """
    tell_code_apart()
    backend: str | activation_checkpoint.Backend = name
    if recomputation.mode == "memory_budget":
        backend = activation_checkpoint.keep_within_budget(
            name, recomputation.memory_budget, has_meshes=has_meshes
        )
    for block in model.layers.values():
        if keeps_casts and backend == "inductor":
            block.compile(fullgraph=True, options={"emulate_precision_casts": True})
        else:
            block.compile(fullgraph=True, backend=backend)
    if model.output is not None:
        model.output.loss.compile(name)  # which keeps nothing for backward
    return f"torch.compile: each block and the loss, by {name}"
