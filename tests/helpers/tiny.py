"""A Llama small enough for every test, odd where that finds mistakes; and ways to build it."""

import dataclasses
import functools
from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder
from meshwright.models.initialize import initialize
from meshwright.models.llama import LlamaArgs
from meshwright.parallelisms.local_model import LocalModel, build_local_model
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.parallelisms.parallelize import parallelize
from meshwright.parallelisms.pipeline_split import split_evenly

# 131 rows, and 66 inner ones, leave uneven shards on 2 or on 4 ranks
TINY = LlamaArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=66, vocab_size=131)
TIED = dataclasses.replace(TINY, tie_embeddings=True)
SEQ_LEN = 16


# hundreds of tests in one process: its groups are never freed, and slow down what follows
meshes_of = functools.cache(build_meshes)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, however it is sharded. Collective if it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def plain_model(args: LlamaArgs = TINY, seed: int = 0) -> Decoder:
    """On this process alone, untouched by any parallelism."""
    model = Decoder(args, SEQ_LEN)
    initialize(model, seed)
    return model


def parallel_model(
    dims: ParallelDims,
    args: LlamaArgs = TINY,
    seed: int = 0,
    param_dtype: torch.dtype = torch.float32,
    master_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    microbatches: tuple[int, int] = (1, 1),
    fp32_modules: Collection[str] = (),
    enable_cpu_offload: bool = False,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    frozen: Collection[str] = (),
    **options: object,
) -> tuple[LocalModel, Meshes]:
    """As the trainer builds it, and the meshes it is on.

    Args:
        microbatches: their number, and the sequences in each (needed for a pipeline).
    """
    meshes = meshes_of(dims, "cpu")
    num_stages = dims.pp * stages_per_rank
    model = build_local_model(
        functools.partial(Decoder, args, SEQ_LEN),
        functools.partial(
            parallelize,
            meshes=meshes,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            fp32_modules=fp32_modules,
            enable_cpu_offload=enable_cpu_offload,
            **options,
        ),
        split_evenly(args.n_layers, num_stages, layer=1, embedding=0, output=0),
        frozen=frozen,
        meshes=meshes,
        schedule=schedule,
        num_microbatches=microbatches[0],
        activation_shape=(microbatches[1], SEQ_LEN, args.dim),
        dtype=param_dtype,
        master_dtype=master_dtype,
        fp32_modules=fp32_modules,
        device=torch.device("cpu"),
        enable_cpu_offload=enable_cpu_offload,
    )
    for stage in model.stages:
        initialize(stage, seed)
    return model, meshes
