"""A Llama small enough for every test, odd where that finds mistakes; and ways to build it."""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.config.job_config import JobConfig
from meshwright.config.parallelism import ActivationCheckpoint, Compile, Float8, Parallelism
from meshwright.config.training import Experts, Training
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.table import MixtureSpec
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.local_model import LocalModel, allocate, build_local_model
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.parallelisms.parallelize import parallelize
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.rules.precision import find_float8_layers
from meshwright.parallelisms.rules.stages import assign_modules, split_evenly

# 131 rows, and 66 inner ones, leave uneven shards on 2 or on 4 ranks
TINY = LlamaArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=66, vocab_size=131)
TIED = dataclasses.replace(TINY, tie_embeddings=True)
# the first layer has no experts, and 8 of them are cut by 1, 2, 4 or 8
MIXED = Qwen3MoeArgs(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    hidden_dim=64,
    vocab_size=131,
    head_dim=8,
    n_experts=8,
    n_active=3,
    expert_dim=24,
    n_dense_layers=1,
)


@dataclasses.dataclass(frozen=True)
class BiasedArgs(Qwen3MoeArgs):
    """With the experts of gpt-oss, as a family of a user; biases do not start at zero."""

    def mixture(self, hidden_dim: int, out_std: float, **options: Any) -> MixtureSpec:
        options |= {"activation": "clamped_swiglu", "bias_std": 0.5}
        return super().mixture(hidden_dim, out_std, **options)


SEQ_LEN = 16
CPU = torch.device("cpu")

SECTIONS = {
    "training": Training,
    "parallelism": Parallelism,
    "experts": Experts,
    "activation_checkpoint": ActivationCheckpoint,
    "compile": Compile,
}
"""Which have the options that tests give."""
KEYS = {  # where they differ from the options' names
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "prefetch_layers": "fsdp_prefetch_layers",
    "ac_mode": "mode",
    "compile_backend": "backend",
}

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
    float8: Float8 = Float8(),
    **options: object,
) -> tuple[LocalModel, Meshes]:
    """As the trainer builds it, and the meshes it is on.

    Args:
        microbatches: their number, and the sequences in each (needed for a pipeline).
        options: as the keys of the sections.
    """
    meshes = meshes_of(dims, "cpu")
    num_stages = dims.pp * stages_per_rank
    given: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    for option, value in options.items():
        key = KEYS.get(option, option)
        name = next(n for n, section in SECTIONS.items() if key in section.model_fields)
        given[name][key] = value
    given["compile"]["enable"] = bool(options.get("compile_backend"))
    given["training"] |= {
        "dtype": _name(master_dtype),
        "mixed_precision_param": _name(param_dtype),
        "mixed_precision_reduce": _name(reduce_dtype),
        "local_batch_size": microbatches[1],
        "global_batch_size": microbatches[0] * microbatches[1] * dims.dp,
        "seq_len": SEQ_LEN,
        "enable_cpu_offload": enable_cpu_offload,
    }
    config = JobConfig(float8=float8, **given)

    def prepare(stage: Decoder) -> None:
        parallelize(
            stage,
            meshes,
            config,
            fp32_modules=fp32_modules,
            float8_layers=find_float8_layers(config, args.table, fp32_modules),
        )
        allocate(stage, CPU, CPU)

    parts = split_evenly([1] * args.n_layers, num_stages, embedding=0, output=0)
    pipeline = Parallelism(pipeline_parallel_degree=dims.pp, module_fqns_per_model_part=parts)
    model = build_local_model(
        functools.partial(Decoder, args, SEQ_LEN),
        prepare,
        assign_modules(pipeline, args.table, SEQ_LEN),
        frozen=frozen,
        fp32_modules=fp32_modules,
        meshes=meshes,
        training=config.training,
        schedule=schedule,
        device=CPU,
    )
    for stage in model.stages:
        initialize(stage, seed)
    return model, meshes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lines_on_one_rank(
    dtype: str,
    device_type: str = "cpu",
    model: Decoder | None = None,
    mask_documents: bool = False,
    **compilation: object,
) -> list[str]:
    """What the log says of a model that one rank computes in `dtype`, compiled or not."""
    alone = SimpleNamespace(size=lambda: 1, device_type=device_type)
    return parallelize(
        plain_model(TINY) if model is None else model,
        cast(Meshes, SimpleNamespace(world=alone, tp=alone, cp=alone, ep=None)),
        JobConfig(
            training=Training(mixed_precision_param=dtype, mask_documents=mask_documents),
            compile=Compile(backend="eager", **{"enable": False} | compilation),
        ),
    )


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process is one rank of a job whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
