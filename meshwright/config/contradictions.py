"""Contradictions: values of a config that cannot be had beside others, on any mesh that it names.

An error. A new rule is a row.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from meshwright.config.idle import value_of
from meshwright.config.job_config import JobConfig, num_decay_steps, schedule_steps
from meshwright.system.errors import Mistakes, check


class Contradiction(NamedTuple):
    """A value that cannot be had beside others. `{section.key}` in a text stands for a value."""

    key: str
    is_there: Callable[[JobConfig], bool]
    rule: str
    fix: str


def _decays_too_long(c: JobConfig) -> bool:
    needed = c.lr_scheduler.warmup_steps + num_decay_steps(c)
    return c.lr_scheduler.decay_ratio is not None and needed > schedule_steps(c)


def _may_be_compiled_by(c: JobConfig, *backends: str) -> bool:
    """Return whether one of these backends compiles; "auto" compiles if an option needs it."""
    return c.compile.enable is not False and c.compile.backend in backends


WITHOUT_PIPELINE = "leave it out, or set parallelism.pipeline_parallel_degree = 1"


ENABLE_CHECKPOINTS = "set checkpoint.enable = true"


ONE_OF_TWO = "leave one of the two out"


TOO_EARLY = (
    "optimizer.early_step_in_backward updates weights before it is known whether the step is bad"
)


CONTRADICTIONS = (
    Contradiction(
        "lr_scheduler.decay_ratio",
        lambda c: not c.lr_scheduler.total_steps and _decays_too_long(c),
        "so many steps of decay do not fit in {training.steps} after {lr_scheduler.warmup_steps} "
        "of warm-up",
        "lower it, or lr_scheduler.warmup_steps",
    ),
    Contradiction(
        "lr_scheduler.decay_ratio",
        lambda c: bool(c.lr_scheduler.total_steps) and _decays_too_long(c),
        "so many steps of decay do not fit in lr_scheduler.total_steps = "
        "{lr_scheduler.total_steps} after {lr_scheduler.warmup_steps} of warm-up",
        "lower it, or lr_scheduler.warmup_steps",
    ),
    Contradiction(
        "lr_scheduler.total_steps",
        lambda c: schedule_steps(c) < c.training.steps,
        "the schedule ends before training.steps = {training.steps}",
        "raise it, or leave it out",
    ),
    Contradiction(
        "checkpoint.load_step",
        lambda c: c.checkpoint.load_step != -1 and not c.checkpoint.enable,
        "nothing is loaded while checkpoint.enable is false",
        ENABLE_CHECKPOINTS,
    ),
    Contradiction(
        "checkpoint.keep_best",
        lambda c: c.checkpoint.keep_best and not c.validation.enable,
        "no checkpoint is the best one while nothing is validated",
        "set validation.enable = true, or leave it out",
    ),
    Contradiction(
        "checkpoint.exclude_from_loading",
        lambda c: bool(c.checkpoint.exclude_from_loading) and not c.checkpoint.enable,
        "nothing is loaded while checkpoint.enable is false",
        ENABLE_CHECKPOINTS,
    ),
    Contradiction(
        "job.max_run_seconds",
        lambda c: c.job.max_run_seconds > 0 and not c.checkpoint.enable,
        "what was trained by then would be lost: checkpoint.enable is false",
        ENABLE_CHECKPOINTS,
    ),
    Contradiction(
        "job.max_run_seconds",
        lambda c: c.job.max_run_seconds > 0 and c.checkpoint.load_only,
        "what was trained by then would be lost: checkpoint.load_only is true",
        "set checkpoint.load_only = false",
    ),
    Contradiction(
        "checkpoint.initial_load_in_hf",
        lambda c: c.checkpoint.initial_load_in_hf and not c.checkpoint.initial_load_path,
        "nothing is loaded: checkpoint.initial_load_path is not given",
        "name the folder there; or in model.flavor, which then gives dimensions and tokenizer too",
    ),
    Contradiction(
        "activation_checkpoint.mode",
        lambda c: (
            c.activation_checkpoint.mode == "memory_budget"
            and not _may_be_compiled_by(c, "inductor", "aot_eager")
        ),
        "it is the compiler that decides, and backend eager decides nothing",
        'set compile.enable = true and compile.backend = "inductor", or choose another mode',
    ),
    Contradiction(
        "optimizer.early_step_in_backward",
        lambda c: c.optimizer.early_step_in_backward and c.training.max_norm != inf,
        "gradients are gone before their norm is known, so training.max_norm = {training.max_norm} "
        "cannot be kept",
        "set training.max_norm = inf",
    ),
    Contradiction(
        "parallelism.fsdp_reduce_gradients",
        lambda c: (
            c.optimizer.early_step_in_backward
            and c.parallelism.fsdp_reduce_gradients == "every_microbatch"
        ),
        "optimizer.early_step_in_backward would update with the gradients of one microbatch",
        ONE_OF_TWO,
    ),
    Contradiction(
        "bad_steps.policy",
        lambda c: c.optimizer.early_step_in_backward and c.bad_steps.policy == "skip",
        TOO_EARLY,
        ONE_OF_TWO,
    ),
    Contradiction(
        "bad_steps.spike_std",
        lambda c: c.optimizer.early_step_in_backward and c.bad_steps.spike_std > 0,
        TOO_EARLY,
        ONE_OF_TWO,
    ),
    Contradiction(
        "metrics.grad_norm_by_group",
        lambda c: c.metrics.grad_norm_by_group and c.optimizer.early_step_in_backward,
        "optimizer.early_step_in_backward frees each gradient before the norms are taken",
        ONE_OF_TWO,
    ),
    Contradiction(
        "profiling.profile_freq",
        lambda c: (
            c.profiling.profile_freq < c.profiling.profiler_warmup + c.profiling.profiler_active
        ),
        "is less than profiler_warmup {profiling.profiler_warmup} + profiler_active "
        "{profiling.profiler_active}",
        "raise it to their sum or more",
    ),
    Contradiction(
        "training.dtype",
        lambda c: c.training.dtype not in ("float32", c.training.mixed_precision_param),
        "weights stored in {training.dtype} cannot be computed with in "
        "{training.mixed_precision_param}",
        'set training.mixed_precision_param = "bfloat16"',
    ),
    Contradiction(
        "parallelism.fsdp_prefetch_layers",
        lambda c: (
            c.parallelism.pipeline_parallel_degree > 1 and c.parallelism.fsdp_prefetch_layers > 1
        ),
        "a pipeline's stages stay gathered, there is nothing to gather ahead",
        WITHOUT_PIPELINE,
    ),
    Contradiction(
        "parallelism.fsdp_reduce_gradients",
        lambda c: (
            c.parallelism.pipeline_parallel_degree > 1
            and c.parallelism.fsdp_reduce_gradients == "every_microbatch"
        ),
        "a pipeline's schedule reduces gradients once, after its last microbatch",
        WITHOUT_PIPELINE,
    ),
    Contradiction(
        "parallelism.enable_async_tensor_parallel",
        lambda c: (
            c.parallelism.enable_async_tensor_parallel
            and c.parallelism.tensor_parallel_degree > 1
            and not _may_be_compiled_by(c, "inductor")
        ),
        "inductor does it, and nothing is compiled by inductor",
        'set compile.enable = true and compile.backend = "inductor", or leave it out',
    ),
    Contradiction(
        "parallelism.enable_async_tensor_parallel",
        lambda c: (
            c.float8.enable
            and c.parallelism.enable_async_tensor_parallel
            and c.parallelism.tensor_parallel_degree > 1
        ),
        "is not known to work with float8.enable",
        ONE_OF_TWO,
    ),
    Contradiction(
        "activation_checkpoint.mode",
        lambda c: c.float8.enable and c.activation_checkpoint.mode == "memory_budget",
        "is not known to work with float8.enable",
        "choose another mode",
    ),
    Contradiction(
        "training.attention_kernel",
        lambda c: c.training.attention_kernel == "cudnn" and c.training.deterministic,
        "cuDNN's backward is not deterministic, and training.deterministic is true",
        'use "flash"',
    ),
    Contradiction(
        "float8.enable",
        lambda c: c.float8.enable and c.training.mixed_precision_param != "bfloat16",
        "results of float8 products are bfloat16, and training.mixed_precision_param is "
        "{training.mixed_precision_param}",
        'set training.mixed_precision_param = "bfloat16"',
    ),
)


def check_contradictions(config: JobConfig) -> None:
    """Check the rules between keys that need nothing but the config.

    Raises:
        ConfigError: naming the broken rules.
    """
    mistakes = Mistakes()
    for row in CONTRADICTIONS:
        rule = row.rule.format_map(dict(config))
        with mistakes.collect():
            check(not row.is_there(config), row.key, value_of(config, row.key), rule, row.fix)
    mistakes.check()
