"""One rank's part of the model."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from meshwright.models.decoder import Decoder
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.pipeline_parallel import Pipeline, keep_modules
from meshwright.parallelisms.pipeline_split import stages_of_rank


class LocalModel(nn.Module):
    """This rank's stages, and a view of all their parameters under the plain model's names.

    It has no forward: a step calls `stages[0]`, or `pipeline` where there is one.
    """

    stages: tuple[Decoder, ...]
    """In the order of the model; without a pipeline one, the whole model."""
    pipeline: Pipeline | None

    def __init__(self, stages: Sequence[Decoder], pipeline: Pipeline | None = None) -> None:
        super().__init__()
        self.stages, self.pipeline = tuple(stages), pipeline
        self.layers = nn.ModuleDict()
        for stage in stages:
            self.layers.update(dict(stage.layers.items()))
            for name, child in stage.named_children():
                if name != "layers":
                    self.add_module(name, child)


def allocate(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Give tensors of `model` on meta memory on these devices; values are arbitrary."""
    model.to_empty(device=parameters)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(buffers))


Allocate = Callable[[nn.Module, torch.device, torch.device], None]
"""Does what `allocate` does; planning gives memory that is not there."""


def build_local_model(
    build: Callable[[], Decoder],
    parallelize: Callable[[Decoder], None],
    stage_modules: Sequence[Sequence[str]],
    *,
    frozen: Collection[str] = (),
    meshes: Meshes,
    schedule: str,
    num_microbatches: int,
    activation_shape: tuple[int, int, int],
    dtype: torch.dtype,
    master_dtype: torch.dtype,
    fp32_modules: Collection[str],
    device: torch.device,
    enable_cpu_offload: bool = False,
    allocate: Allocate = allocate,
) -> LocalModel:
    """Build this rank's stages on meta, cut and parallelise them, and give them memory.

    Values are arbitrary yet. Collective: all ranks of the job must call it.

    Args:
        build: the whole model.
        parallelize: as `parallelize`, with its options bound.
        stage_modules: names of the modules of every stage; one stage: no pipeline.
        frozen: names of the parameters that are not trained.
        activation_shape: (B, S, D) of one microbatch of a data-parallel rank.
        dtype: of activations.
        master_dtype: of parameters, as the optimizer sees them; buffers keep their own.
        fp32_modules: names of modules whose parameters are fp32.
        device: of activations and buffers, and of parameters unless `enable_cpu_offload`.
    """
    num_stages, stages, first_trained = len(stage_modules), {}, 0
    for index in stages_of_rank(meshes.pp.get_local_rank(), meshes.pp.size(), num_stages, schedule):
        with torch.device("meta"):
            stages[index] = build()
        first_trained = _first_trained(stages[index], stage_modules, frozen)
        keep_modules(stages[index], stage_modules[index])
        for name, parameter in stages[index].named_parameters():
            if not name.startswith(tuple(f"{module}." for module in fp32_modules)):
                parameter.data = parameter.data.to(master_dtype)
        parallelize(stages[index])
        # not before: torch's SequenceParallel makes norms anew, trainable (2.13). FSDP2 asks which
        # parameters are trained no sooner than in the first forward.
        for name, parameter in stages[index].named_parameters():
            parameter.requires_grad_(name not in frozen)
        allocate(stages[index], torch.device("cpu") if enable_cpu_offload else device, device)
    if num_stages == 1:
        return LocalModel([stages[0]])
    batch, seq_len, dim = activation_shape
    seq_len //= meshes.cp.size()
    with torch.device("meta"):
        activation = torch.empty(batch, seq_len // meshes.tp.size(), dim, dtype=dtype)
    pipeline = Pipeline(
        stages,
        num_stages,
        schedule,
        mesh=meshes.pp,
        num_microbatches=num_microbatches,
        first_trained=first_trained,
        seq_len=seq_len,
        activation=activation,
        device=device,
    )
    return LocalModel([*stages.values()], pipeline)


def _first_trained(
    model: Decoder, stage_modules: Sequence[Sequence[str]], frozen: Collection[str]
) -> int:
    """Index of the first stage that has a parameter to train.

    Args:
        model: the whole.
    """
    for index, modules in enumerate(stage_modules):
        for module in modules:
            parameters = model.get_submodule(module).named_parameters(prefix=module)
            if any(name not in frozen for name, _ in parameters):
                return index
    raise ValueError("every parameter is frozen")
