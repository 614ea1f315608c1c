"""The options that have no effect in a config.

An example is `pipeline_parallel_schedule` without a pipeline. It is reported, not refused, because
the same TOML may run on another mesh. To add a rule, add a row.
"""

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.config.changes import shown
from meshwright.config.fields import value_of
from meshwright.config.job_config import (
    JobConfig,
    suits_cpu_attention,
)
from meshwright.config.training import Source

SOURCE_KEYS = " ".join(key for key in Source.model_fields if key != "dataset")


def _is_one(value: object) -> bool:
    return value == 1


def _is_off(value: object) -> bool:
    return not value


IDLE_BESIDE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("parallelism.tensor_parallel_degree", _is_one, "enable_async_tensor_parallel"),
    (
        "parallelism.pipeline_parallel_degree",
        _is_one,
        "pipeline_parallel_schedule pipeline_parallel_stages_per_rank module_fqns_per_model_part",
    ),
    ("training.mixed_precision_param", lambda dtype: dtype == "float32", "fp32_modules"),
    ("training.datasets", bool, SOURCE_KEYS),
    ("validation.sample_prompts", _is_off, "sample_tokens"),
    ("validation.datasets", bool, SOURCE_KEYS),
    ("optimizer.weight_decay", _is_off, "decay_norm_and_bias"),
    ("bad_steps.policy", lambda policy: policy == "stop", "budget"),
    ("bad_steps.spike_std", _is_off, "spike_window"),
    (
        "activation_checkpoint.mode",
        lambda mode: mode != "selective",
        "selective_ac_option saved_ops",
    ),
    ("activation_checkpoint.selective_ac_option", lambda option: option != "op", "saved_ops"),
    ("activation_checkpoint.mode", lambda mode: mode != "memory_budget", "memory_budget"),
    ("checkpoint.keep_latest_k", _is_off, "keep_every_n_steps"),
    ("metrics.enable_tensorboard", _is_off, "save_tb_folder"),
    ("metrics.enable_wandb", _is_off, "wandb_project wandb_entity wandb_name"),
)
"""A key, which of its values disable other keys of its section, and those keys."""

IDLE_WHERE: tuple[tuple[str, Callable[[JobConfig], bool], str], ...] = (
    (
        "parallelism.fsdp_reshard_after_forward parallelism.fsdp_prefetch_layers "
        "parallelism.fsdp_cpu_backend parallelism.fsdp_reduce_gradients "
        "training.mixed_precision_reduce",
        lambda c: not c.has_fsdp,
        "one rank with float32 weights and gradients uses no FSDP",
    ),
    (
        "training.attention_kernel",
        lambda c: c.training.mask_documents or c.parallelism.context_parallel_degree > 1,
        "documents and context parallelism have kernels of their own",
    ),
    (
        "parallelism.fsdp_reduce_gradients",
        lambda c: c.num_microbatches == 1,
        "a step has one microbatch",
    ),
    (
        "compile.cpu_attention",
        lambda c: not suits_cpu_attention(c.training, c.parallelism),
        "it is for attention without mask_documents and context parallelism",
    ),
    (
        "profiling.profile_freq",
        lambda c: not (c.profiling.enable_profiling or c.profiling.enable_memory_snapshot),
        "profiling.enable_profiling = False",
    ),
    (
        "checkpoint.export_dtype",
        lambda c: not (c.checkpoint.last_save_model_only or c.checkpoint.last_save_in_hf),
        "the last save is a whole checkpoint",
    ),
    (
        "lr_scheduler.decay_type lr_scheduler.min_lr_factor",
        lambda c: c.num_decay_steps == 0,
        "no step is left for a decay",
    ),
)
"""Keys, the configs in which they have no effect, and why."""


def idle_options(config: JobConfig) -> Iterator[str]:
    """Say which options differ from their default and have no effect, each once, and why.

    Args:
        config: with every -1 filled in.
    """
    reasons = _switched_off(config)
    for cause, is_met, keys in IDLE_BESIDE:
        value, (section, _) = value_of(config, cause), cause.split(".")
        for key in keys.split() if is_met(value) else ():
            reasons.setdefault(f"{section}.{key}", f"{cause} = {shown(value)}")
    for keys, is_met, why in IDLE_WHERE:
        for key in keys.split() if is_met(config) else ():
            reasons.setdefault(key, why)
    defaults = JobConfig()
    for key, why in reasons.items():
        value = value_of(config, key)
        if value != value_of(defaults, key):
            yield f"{key} = {shown(value)} has no effect: {why}"
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if warmup > steps:
        yield (
            f"optimizer.lr = {config.optimizer.lr} is never reached: lr_scheduler.warmup_steps = "
            f"{warmup}, and the job has {steps}"
        )


def _switched_off(config: JobConfig) -> dict[str, str]:
    """Return the keys of sections that are off, and why; first weights are loaded all the same."""
    return {
        f"{name}.{key}": f"{name}.enable = False"
        for name, section in config
        if getattr(section, "enable", None) is False
        for key in type(section).model_fields
        if key != "enable" and not key.startswith("initial_load")
    }
