"""Rules across sections, and the values that follow from the rest of the config."""

import math
import os
from pathlib import Path
from typing import Protocol

from meshwright.config.job_config import JobConfig
from meshwright.errors import check


def fill_in(config: JobConfig, world_size: int, num_stages: int) -> JobConfig:
    """`config` with every -1 replaced by what it stands for on `world_size` ranks.

    Args:
        num_stages: of the pipeline, over all ranks; a batch that is not given fills them once.

    Raises:
        ConfigError: if the degrees do not multiply to `world_size`, or the batch does not divide.
    """
    parallelism = config.parallelism
    key = "parallelism.data_parallel_shard_degree"
    shard = parallelism.data_parallel_shard_degree
    others = (
        parallelism.data_parallel_replicate_degree
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )
    if shard == -1:
        check(
            world_size % others == 0,
            key,
            shard,
            f"cannot be filled in: the other degrees make {others}, which does not divide "
            f"{world_size} ranks",
            f"launch a multiple of {others} ranks, or lower a degree",
        )
        shard = world_size // others
    check(
        shard * others == world_size,
        key,
        shard,
        f"the degrees multiply to {shard * others}, but there are {world_size} ranks",
        f"launch {shard * others} ranks (NGPU), or set it to -1"
        if shard
        else "set it to -1 for all ranks that the other degrees leave over",
    )
    dp = shard * parallelism.data_parallel_replicate_degree
    training = config.training
    per_microbatch = dp * training.local_batch_size
    global_batch_size = training.global_batch_size
    if global_batch_size == -1:
        global_batch_size = per_microbatch * num_stages
    nearest = max(1, round(global_batch_size / per_microbatch)) * per_microbatch
    check(
        global_batch_size > 0 and global_batch_size % per_microbatch == 0,
        "training.global_batch_size",
        global_batch_size,
        f"must be a positive multiple of {per_microbatch} = {dp} data-parallel "
        f"ranks x local_batch_size {training.local_batch_size}",
        f"the nearest is {nearest}",
    )
    return config.model_copy(
        update={
            "parallelism": parallelism.model_copy(update={"data_parallel_shard_degree": shard}),
            "training": training.model_copy(update={"global_batch_size": global_batch_size}),
        }
    )


def check_sections(config: JobConfig) -> None:
    """Rules that need nothing but the config.

    Raises:
        ConfigError: naming the first that is broken.
    """
    schedule, steps = config.lr_scheduler, config.training.steps
    decay_steps = round(steps * (schedule.decay_ratio or 0))
    check(
        schedule.decay_ratio is None or schedule.warmup_steps + decay_steps <= steps,
        "lr_scheduler.decay_ratio",
        schedule.decay_ratio,
        f"{decay_steps} steps of decay do not fit in {steps} after {schedule.warmup_steps} of "
        "warm-up",
        "lower it, or lr_scheduler.warmup_steps",
    )
    check(
        config.checkpoint.enable or config.checkpoint.load_step == -1,
        "checkpoint.load_step",
        config.checkpoint.load_step,
        "nothing is loaded while checkpoint.enable is false",
        "set checkpoint.enable = true",
    )
    check(
        config.activation_checkpoint.mode != "memory_budget"
        or (config.compile.enable and config.compile.backend != "eager"),
        "activation_checkpoint.mode",
        "memory_budget",
        "it is the compiler that decides, and backend eager decides nothing",
        'set compile.enable = true and compile.backend = "inductor", or choose another mode',
    )
    check(
        not config.optimizer.early_step_in_backward or config.training.max_norm == math.inf,
        "optimizer.early_step_in_backward",
        True,
        f"gradients are gone before their norm is known, so training.max_norm = "
        f"{config.training.max_norm} cannot be kept",
        "set training.max_norm = inf",
    )
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    check(
        profiling.profile_freq >= needed,
        "profiling.profile_freq",
        profiling.profile_freq,
        f"is less than profiler_warmup + profiler_active = {needed}",
        f"raise it to {needed} or more",
    )


class HasHeads(Protocol):
    """The dimensions that tensor parallelism divides."""

    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def hidden_dim(self) -> int: ...


def check_divisible(config: JobConfig, args: HasHeads) -> None:
    """What each rank gets an equal part of must divide by the number of ranks.

    Raises:
        ConfigError: naming the first that does not, and the degrees that would do.
    """
    cp = config.parallelism.context_parallel_degree
    seq_len = config.training.seq_len
    check(
        cp == 1 or seq_len % (2 * cp) == 0,
        "parallelism.context_parallel_degree",
        cp,
        f"twice it must divide training.seq_len = {seq_len}: a rank has two chunks of a sequence",
        f"the nearest training.seq_len is {max(1, round(seq_len / (2 * cp))) * 2 * cp}",
    )
    degree = config.parallelism.tensor_parallel_degree
    per_rank = " / context_parallel_degree" if cp > 1 else ""
    parts = {
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "hidden_dim": args.hidden_dim,
        f"training.seq_len{per_rank}": seq_len // cp,
    }
    common = math.gcd(*parts.values())
    for name, size in parts.items():
        check(
            size % degree == 0,
            "parallelism.tensor_parallel_degree",
            degree,
            f"does not divide {name} = {size}",
            f"use a divisor of {common}",
        )


def check_writable(folder: str) -> None:
    """Check that `job.dump_folder` is, or can be made, a folder to write to; write nothing."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    check(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        "job.dump_folder",
        folder,
        f"{existing} is not a folder that can be written to",
        "name another folder",
    )
