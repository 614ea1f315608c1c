"""The order in which a model is made parallel."""

import hashlib
import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch.compiler import config as compiler

from meshwright.config.job_config import JobConfig, needs_fsdp_alone, wants_cpu_attention
from meshwright.config.parallelism import ActivationCheckpoint, Float8
from meshwright.models.decoder import Decoder
from meshwright.parallelisms import (
    activation_checkpoint,
    context_parallel,
    data_parallel,
    delta_kernel,
    expert_parallel,
)
from meshwright.parallelisms.compiled_libraries import remove_unfinished
from meshwright.parallelisms.meshes import Meshes


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Hold back warnings while torchao is imported: of kernels that it can't load, none of which
    is needed here, and of a function of torch's that it shouldn't call."""
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [one.level for one in noisy]
    for one in noisy:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(noisy, levels, strict=True):
            one.setLevel(level)


def apply_float8(model: Decoder, names: Collection[str], options: Float8) -> str:
    """Have the linear layers of these names multiply in float8, in place.

    Parameters keep their names and types. A layer rounds its input, its weight and the gradient of
    its output to e4m3 (tensorwise: the gradient to e5m2), each scaled to the range of the type,
    and the products are bf16. Scales of weights are of the full weight on every mesh. A stage of a
    pipeline takes its own of the `names`. Return a line for the log. Source: Micikevicius et al.
    2022, arXiv:2209.05433 (the types).
    """
    with quiet_torchao():
        from meshwright.parallelisms import float8  # with torchao, which is optional

    float8.replace_layers(model, names, options)
    num_layers = sum(name in names for name, _ in model.named_modules())
    emulated = ", emulated" if options.emulate else ""
    return f"float8: {num_layers} layers, {options.recipe_name}{emulated}"


def share_float8_scales(model: Decoder, meshes: Meshes) -> None:
    """See `float8.share_scales`."""
    from meshwright.parallelisms import float8  # with torchao, which `apply_float8` has imported

    float8.share_scales(model, meshes)


OURS = Path(__file__).parents[1]

FOLDERS = ("models", "parallelisms")
"""Of the code that graphs are made of."""


def tell_code_apart() -> None:
    """Let a graph be found again only by the code that made it, and on a CPU of that kind.

    Of our operators and policies of recomputation torch's key has the names only, and not the
    gradients and layouts, which are part of the graph: another version of Meshwright would train
    with those of the one before. The key also leaves out the vector instructions that a graph's C++
    is written for. On another CPU that shares the cache such graphs don't compile, or write beyond
    the ends of tensors. What the user has put into the key stays.
    """
    tag = f"{_hash_of_code()} {torch.backends.cpu.get_cpu_capability()}"
    if tag not in compiler.cache_key_tag:
        compiler.cache_key_tag += tag


@cache
def _hash_of_code() -> str:
    found = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((OURS / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return f" meshwright {found.hexdigest()[:16]}"


def parallelize(
    model: Decoder,
    meshes: Meshes,
    config: JobConfig,
    *,
    fp32_modules: Collection[str] = (),
    float8_layers: Collection[str] = (),
) -> list[str]:
    """Wrap and shard `model` in place, best while it is on the meta device. The order is fixed:

    0. Float8 layers, which take the place of others under the same names.
    1. Tensor parallelism first, because its plan finds submodules by their plain names, those of
       the model's table. Then expert parallelism, of the parameters that it leaves unchanged.
    2. Context parallelism, or GPUs' kernel of linear attention, inside of every wrapper of a block.
    3. Activation checkpointing before compile, so that the compiler sees the recomputation.
    4. Compile block by block, so that one graph serves every layer; and the loss. On CPUs, the
       kernel of attention as well.
    5. FSDP last, so that its hooks surround the compiled blocks; on a single rank too if it has to
       offload or to add gradients up. Otherwise it would only copy: layers cast their own weights.

    Args:
        fp32_modules: as `apply_fsdp` takes them.
        float8_layers: as `apply_float8` takes them, if `float8.enable`.

    Returns:
        A line for the log about each step that was applied.
    """
    training, parallelism, compilation = config.training, config.parallelism, config.compile
    recomputation, float8, applied = config.activation_checkpoint, config.float8, list[str]()
    if float8.enable:
        applied.append(apply_float8(model, float8_layers, float8))
    if meshes.tp.size() > 1:
        from meshwright.parallelisms import tensor_parallel  # with DTensors: 0.4 s

        applied.append(tensor_parallel.apply_tp(model, meshes.tp))
        if parallelism.enable_async_tensor_parallel:
            applied.append(tensor_parallel.enable_async_tp(meshes.tp))
    if model.table.mixtures:
        expert_parallel.balance(model, meshes, training, config.experts)
        if meshes.ep is not None:
            applied.append(expert_parallel.apply_ep(model, meshes.ep))
    if meshes.cp.size() > 1:
        is_compared = config.sentry.interval > 0
        applied.append(
            context_parallel.apply_cp(
                model, meshes.cp, training, tp=meshes.tp.size(), is_compared=is_compared
            )
        )
    if line := delta_kernel.apply_delta_kernel(model, meshes.world.device_type, config):
        applied.append(line)
    is_on_cpu = meshes.world.device_type == "cpu"
    has_meshes = meshes.tp.size() > 1 or meshes.ep is not None  # as parts of DTensors
    if recomputation.mode != "none":
        is_beside = compilation.is_on and is_on_cpu and has_meshes
        kept = activation_checkpoint.KEPT_BESIDE_MESHES if is_beside else ()
        applied.append(activation_checkpoint.apply_ac(model.layers, recomputation, kept))
    if model.output is not None:
        model.output.loss.chunk_tokens = training.loss_chunk_tokens
    if compilation.is_on:
        remove_unfinished()
        if is_on_cpu and wants_cpu_attention(compilation, training, parallelism):
            from meshwright.parallelisms.cpu_kernels import attention  # an operator, for CPUs only

            dtype = getattr(torch, training.mixed_precision_param)
            applied.append(attention.apply_cpu_attention(model, dtype))
        casts = float8.enable and float8.recipe_name == "rowwise"
        applied.append(
            _compile(
                model, compilation.backend, recomputation, has_meshes=has_meshes, keeps_casts=casts
            )
        )
    if meshes.world.size() == 1 and not needs_fsdp_alone(training):
        applied.append(
            data_parallel.compute_in(model, training.mixed_precision_param, fp32_modules)
        )
    else:
        applied.append(data_parallel.apply_fsdp(model, meshes, training, parallelism, fp32_modules))
    if float8.enable:
        share_float8_scales(model, meshes)
    return applied


def _compile(
    model: Decoder,
    name: str,
    recomputation: ActivationCheckpoint,
    *,
    has_meshes: bool,
    keeps_casts: bool,
) -> str:
    """Compile every block and the loss by the backend of that name."""
    tell_code_apart()
    # on GPUs inductor advises lower precision for fp32 matmuls: of routers, which are to be exact
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # torch warns of operations in place under recomputation; blocks have them on new tensors only
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # on CPUs of a machine with CUDA it warns that there is no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    backend: str | activation_checkpoint.Backend = name
    if recomputation.mode == "memory_budget":
        backend = activation_checkpoint.keep_within_budget(
            name, recomputation.memory_budget, has_meshes=has_meshes
        )
    for block in model.layers.values():
        # inductor then rounds to bf16 wherever eager blocks do. Otherwise a norm and the scales of
        # its rows may come from different numbers: with rowwise float8 losses became NaN on GPUs
        # (pytorch issue 150859).
        if keeps_casts and backend == "inductor":
            block.compile(fullgraph=True, options={"emulate_precision_casts": True})
        else:
            block.compile(fullgraph=True, backend=backend)
    if model.output is not None:
        model.output.loss.compile(name)  # which keeps nothing for backward
    return f"torch.compile: each block and the loss, by {name}"
