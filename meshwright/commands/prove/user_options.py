"""The options of the user's job, as the cases of a proof take them. Free of torch."""

import math
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Facts, broken_rules
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.rules import memory, stages
from meshwright.parallelisms.rules.degrees import DEGREES, MESH, fill_in_mesh
from meshwright.parallelisms.rules.precision import choose_type
from meshwright.train.optim.registry import OPTIMIZERS, MatrixWise

SCHEDULE = "pipeline_parallel_schedule"
STAGES, STAGES_PER_RANK = "module_fqns_per_model_part", "pipeline_parallel_stages_per_rank"
REDUCE = "fsdp_reduce_gradients"
REDUCE_TYPE = "mixed_precision_reduce"

Options = dict[str, Any]
"""By section: values by key."""


def own_options(config: JobConfig) -> Options:
    """Return the config's options, without its degrees and those tied to the size of the model."""
    left_out = {*DEGREES.values(), STAGES, STAGES_PER_RANK}
    left_out.add("enable_async_tensor_parallel")  # needs GPUs
    if config.parallelism.pipeline_parallel_degree == 1:
        left_out.add(SCHEDULE)
    return {
        "parallelism": config.parallelism.model_dump(exclude=left_out),
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
        "training": {"enable_cpu_offload": config.training.enable_cpu_offload},
        "optimizer": {"early_step_in_backward": config.optimizer.early_step_in_backward},
    }


def for_mesh(options: Options, axes: Collection[str], *, is_eager: bool = False) -> Options:
    """Return the options that a mesh with `axes` can have.

    Args:
        is_eager: leave out the compiler, and the activation checkpointing that it does.
    """
    found = {section: dict(values) for section, values in options.items()}
    if "pp" not in axes:
        found["parallelism"].pop(SCHEDULE, None)
    if is_eager:
        found["compile"]["enable"] = False
        if found["activation_checkpoint"]["mode"] == "memory_budget":
            found["activation_checkpoint"]["mode"] = "none"
    return found


def user_types(config: JobConfig) -> list[str]:
    """Return the keys whose bfloat16 all cases but one replace by float32: of weights and their
    optimizer's state, of reductions, and of Muon where a parameter has it."""
    optimizer, training = config.optimizer, config.training
    names = {optimizer.name, *(group.optimizer for group in optimizer.groups)}
    has_muon = any(isinstance(OPTIMIZERS.get(name or ""), MatrixWise) for name in names)
    types = {
        "dtype": training.dtype,
        REDUCE_TYPE: training.mixed_precision_reduce,
        "muon.dtype": optimizer.muon.dtype if has_muon else "float32",
    }
    return [key for key, dtype in types.items() if dtype == "bfloat16"]


def stored_in_fp32(config: JobConfig) -> Options:
    """Return the changes after which `user_types` finds none."""
    muon = config.optimizer.muon.model_copy(update={"dtype": "float32"})
    training = dict.fromkeys(("dtype", REDUCE_TYPE), "float32")
    return {"training": training, "optimizer": {"muon": muon}}


def reduction_choices(config: JobConfig, args: DecoderArgs) -> list[str]:
    """Return the values of `fsdp_reduce_gradients` that the job has where it accumulates: "auto" is
    resolved for the user's model, on each number of ranks. If it never accumulates: its own."""
    found = dict.fromkeys(
        size.parallelism.fsdp_reduce_gradients
        for size in _sizes(config, args)
        if size.num_microbatches > 1 and size.has_fsdp
    )
    return sorted(found) or [config.parallelism.fsdp_reduce_gradients]


def _sizes(config: JobConfig, args: DecoderArgs) -> Iterator[JobConfig]:
    """Yield the config without -1, and with its reduction chosen, for every number of ranks."""
    p, training, table = config.parallelism, config.training, args.table
    shards = [p.data_parallel_shard_degree]
    if shards == [-1]:
        most = training.global_batch_size // training.local_batch_size
        most //= p.data_parallel_replicate_degree
        shards = [n for n in range(1, most + 1) if most % n == 0] or [1]  # a batch of -1 has 1
    others = [p.data_parallel_replicate_degree, p.tensor_parallel_degree]
    others += [p.context_parallel_degree, p.pipeline_parallel_degree]
    frozen = frozenset(
        name
        for name in table.parameters
        if any(fnmatchcase(name, pattern) for pattern in config.model.frozen)
    )
    for shard in shards:
        ranks = shard * math.prod(others)
        # jobs that need to save memory train on GPUs
        facts = Facts(world_size=ranks, expects_gpus=True, model=args)
        if broken_rules(config, facts, (MESH, stages.TAKES_STAGES)):
            continue
        size = changed(config, fill_in_mesh(config, ranks))
        size = changed(size, choose_type(size, facts).update)
        if broken_rules(size, facts, stages.RULES):
            continue
        modules = stages.assign_modules(p, table, config.training.seq_len)
        load = memory.heaviest_load(size, table, modules, frozen)
        size = changed(size, memory.choose_reduction(size, load))
        if not broken_rules(size, facts, memory.RULES):
            yield size
