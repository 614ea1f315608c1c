"""A Llama small enough for every test, odd where that finds mistakes; and ways to build it."""

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.initialize import initialize
from meshwright.models.llama import LlamaArgs
from meshwright.models.llama.model import Llama
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.parallelisms.parallelize_llama import parallelize_llama

# 131 rows, and 66 inner ones, leave uneven shards on 2 or on 4 ranks
TINY = LlamaArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=66, vocab_size=131)
TIED = dataclasses.replace(TINY, tie_embeddings=True)
SEQ_LEN = 16


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, however it is sharded. Collective if it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def plain_llama(args: LlamaArgs = TINY, seed: int = 0) -> Llama:
    """On this process alone, untouched by any parallelism."""
    model = Llama(args, SEQ_LEN)
    initialize(model, seed)
    return model


def parallel_llama(
    dims: ParallelDims,
    args: LlamaArgs = TINY,
    seed: int = 0,
    param_dtype: torch.dtype = torch.float32,
    **options: object,
):
    """As the trainer builds it, and the meshes it is on."""
    meshes = build_meshes(dims, "cpu")
    with torch.device("meta"):
        model = Llama(args, SEQ_LEN)
    parallelize_llama(model, meshes, param_dtype=param_dtype, reduce_dtype=torch.float32, **options)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model, meshes
