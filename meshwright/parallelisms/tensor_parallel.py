"""Tensor and sequence parallelism: each rank has a part of every matrix and of the sequence."""

import inspect
import warnings

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.models.decoder import Decoder
from meshwright.models.layers.projection import Projection
from meshwright.models.table import Layout
from meshwright.parallelisms.norm_over_ranks import NormOverRanks
from meshwright.parallelisms.vocabulary_parallel import VocabularyParallelLoss


def apply_tp(model: Decoder, mesh: DeviceMesh) -> str:
    """Cut `model` in place over `mesh`, the tp axis; best while it is on the meta device.

    Between blocks a rank has (B, S/tp, D): each pair of a column-wise and a row-wise product
    gathers the sequence before and reduce-scatters it after. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2. The embedding is cut along the vocabulary; so are the output
    and its loss, which gather the sequence themselves.

    Returns:
        A line for the log.

    Raises:
        ValueError: if a parameter has no layout in the model's table.
    """
    styles: dict[Layout, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=Shard(1)),
        # their output is added to the residual stream or rotated, which are plain tensors
        "on_sequence": SequenceParallel(use_local_output=True),
        "on_heads": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    plan: dict[str, ParallelStyle] = {}
    for name, _ in [*model.named_parameters()]:
        parameter = model.table.parameters.get(name)
        if parameter is None:
            raise ValueError(f"{name} has no layout: it is not in the table of the model")
        module = name.rpartition(".")[0]
        if parameter.layout == "over_heads":
            around, _, own = module.rpartition(".")
            norm = NormOverRanks(model.get_submodule(module), mesh)
            setattr(model.get_submodule(around), own, norm)
            continue
        if parameter.layout == "output":
            output = model.get_submodule(module)
            assert isinstance(output, Projection)
            output.weight = nn.Parameter(distribute_tensor(output.weight, mesh, [Shard(0)]))
            continue
        plan[module] = styles[parameter.layout]
        if parameter.layout == "colwise":  # gathered once for all of them
            around = module.rpartition(".")[0]
            plan[around] = _gather(model.get_submodule(around))
    if model.output is not None:  # a tied one's weight is cut as the embedding's
        model.output.loss = VocabularyParallelLoss(mesh)
    for module, style in plan.items():  # by name: torch reads a plan's keys as patterns, each anew
        parallelize_module(model.get_submodule(module), mesh, style)
    if model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(_own_storage)
    return f"tensor parallelism: matrices, and the sequence between them, cut in {mesh.size()}"


def _gather(module: nn.Module) -> PrepareModuleInput:
    """Give `module` whole sequences as its first input; others are the same on every rank."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


def enable_async_tp(mesh: DeviceMesh) -> str:
    """Let inductor overlap collectives over `mesh`, the tp axis, with products beside them.

    It fuses an all-gather and the products that follow, or a product and the reduce-scatter that
    follows, into operations that go piece by piece. Of effect on all that this process compiles
    from now on; needs a CUDA device. Source: Wang et al. 2023, ASPLOS (Overlap Communication with
    Dependent Computation via Decomposition in Large Deep Learning Models).

    Returns:
        A line for the log.
    """
    # No public name up to torch 2.13. If it moves, compiled blocks still give the same numbers, but
    # without overlap.
    torch._inductor.config._micro_pipeline_tp = True
    # Private too, and said to be deprecated and needless, but without it inductor's pass (2.13)
    # takes the group for one that has no symmetric memory, and silently leaves it alone.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return "asynchronous tensor parallelism: collectives overlap with the products beside them"


def _own_storage(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Wait for the reduce-scatter and copy: compiled blocks fail in backward ('Tensor' object has
    no attribute '_local_tensor', torch 2.13) when their input is the collective's own result."""
    return output.clone()
