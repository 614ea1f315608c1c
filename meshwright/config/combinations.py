"""Rules of a config on any mesh: contradictions, options without effect, needs of this machine.

A contradiction is an error: add an `if` that yields it. An option without effect, such as
`pipeline_parallel_schedule` without a pipeline, is reported, not refused, because the same TOML may
run on another mesh: add a row to a table.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.config.changes import shown
from meshwright.config.fields import value_of
from meshwright.config.job_config import JobConfig, suits_cpu_attention
from meshwright.config.optimizer import Muon
from meshwright.config.training import Source
from meshwright.system.errors import ConfigError, Mistakes, check, config_error

WITHOUT_PIPELINE = "leave it out, or set parallelism.pipeline_parallel_degree = 1"
ENABLE_CHECKPOINTS = "set checkpoint.enable = true"
ONE_OF_TWO = "leave one of the two out"


def check_contradictions(config: JobConfig) -> None:
    """Check the rules between keys that need nothing but the config.

    Raises:
        ConfigError: naming the broken rules.
    """
    mistakes = Mistakes()
    for rules in (_schedule, _checkpoints, _early_step, _compiler, _precision, _pipeline, _others):
        mistakes.errors += rules(config)
    mistakes.check()


def _error(config: JobConfig, key: str, rule: str, fix: str) -> ConfigError:
    return config_error(key, value_of(config, key), rule, fix)


def _schedule(c: JobConfig) -> Iterator[ConfigError]:
    key, schedule, steps = "lr_scheduler.decay_ratio", c.lr_scheduler, c.schedule_steps
    is_too_long = schedule.warmup_steps + c.num_decay_steps > steps
    if schedule.decay_ratio is not None and is_too_long:
        total = f"lr_scheduler.total_steps = {steps}" if schedule.total_steps else f"{steps}"
        rule = f"do not fit in {total} after {schedule.warmup_steps} of warm-up"
        fix = "lower it, or lr_scheduler.warmup_steps"
        yield _error(c, key, f"so many steps of decay {rule}", fix)
    if steps < c.training.steps:
        rule = f"the schedule ends before training.steps = {c.training.steps}"
        yield _error(c, "lr_scheduler.total_steps", rule, "raise it, or leave it out")


def _checkpoints(c: JobConfig) -> Iterator[ConfigError]:
    checkpoint, is_off = c.checkpoint, not c.checkpoint.enable
    if is_off:
        rule = "nothing is loaded while checkpoint.enable is false"
        if checkpoint.load_step != -1:
            yield _error(c, "checkpoint.load_step", rule, ENABLE_CHECKPOINTS)
        if checkpoint.exclude_from_loading:
            yield _error(c, "checkpoint.exclude_from_loading", rule, ENABLE_CHECKPOINTS)
    if checkpoint.keep_best and not c.validation.enable:
        rule, fix = "without validation no checkpoint is the best", "or leave it out"
        yield _error(c, "checkpoint.keep_best", rule, f"set validation.enable = true, {fix}")
    if c.job.max_run_seconds and (is_off or checkpoint.load_only):
        key, value = ("enable", "false") if is_off else ("load_only", "true")
        rule = f"the steps trained by then would be lost: checkpoint.{key} is {value}"
        fix = ENABLE_CHECKPOINTS if is_off else "set checkpoint.load_only = false"
        yield _error(c, "job.max_run_seconds", rule, fix)
    if not checkpoint.initial_load_path:
        rule = "nothing is loaded: checkpoint.initial_load_path is not given"
        if checkpoint.initial_load_in_hf:
            fix = "name the folder there; or in model.flavor, which then gives dimensions and"
            yield _error(c, "checkpoint.initial_load_in_hf", rule, f"{fix} tokenizer too")
        if checkpoint.initial_load_upcycle_noise is not None:
            fix = "name the dense model's folder there, or leave it out"
            yield _error(c, "checkpoint.initial_load_upcycle_noise", rule, fix)
    average = checkpoint.average
    if average.decay is not None and average.window_tokens is not None:
        rule = "checkpoint.average.decay gives the mean, too"
        yield _error(c, "checkpoint.average.window_tokens", rule, ONE_OF_TWO)


def _early_step(c: JobConfig) -> Iterator[ConfigError]:
    key = "optimizer.early_step_in_backward"
    if not c.optimizer.early_step_in_backward:
        return
    if c.training.max_norm != inf:
        bound = f"training.max_norm = {c.training.max_norm} cannot be kept"
        rule = f"gradients are gone before their norm is known, so {bound}"
        yield _error(c, key, rule, "set training.max_norm = inf")
    if c.parallelism.fsdp_reduce_gradients == "every_microbatch":
        rule = f"{key} would update with the gradients of one microbatch"
        yield _error(c, "parallelism.fsdp_reduce_gradients", rule, ONE_OF_TWO)
    too_early = f"{key} updates weights before it is known whether the step is bad"
    if c.bad_steps.policy == "skip":
        yield _error(c, "bad_steps.policy", too_early, ONE_OF_TWO)
    if c.bad_steps.spike_std > 0:
        yield _error(c, "bad_steps.spike_std", too_early, ONE_OF_TWO)
    if c.metrics.grad_norm_by_group:
        rule = f"{key} frees each gradient before the norms are taken"
        yield _error(c, "metrics.grad_norm_by_group", rule, ONE_OF_TWO)


def _compiler(c: JobConfig) -> Iterator[ConfigError]:
    # "auto" compiles if an option needs it
    backend = c.compile.backend if c.compile.enable is not False else "none"
    use_inductor = 'set compile.enable = true and compile.backend = "inductor"'
    has_budget = c.activation_checkpoint.mode == "memory_budget"
    if has_budget and backend not in ("inductor", "aot_eager"):
        rule = "the compiler chooses, and backend eager does not"
        fix = f"{use_inductor}, or choose another mode"
        yield _error(c, "activation_checkpoint.mode", rule, fix)
    unknown = "is not known to work with float8.enable"
    if has_budget and c.float8.enable:
        yield _error(c, "activation_checkpoint.mode", unknown, "choose another mode")
    key, p = "parallelism.enable_async_tensor_parallel", c.parallelism
    if p.enable_async_tensor_parallel and p.tensor_parallel_degree > 1:
        if backend != "inductor":
            rule = "it needs inductor, and nothing is compiled by inductor"
            yield _error(c, key, rule, f"{use_inductor}, or leave it out")
        if c.float8.enable:
            yield _error(c, key, unknown, ONE_OF_TWO)


def _precision(c: JobConfig) -> Iterator[ConfigError]:
    computed, fix = c.training.mixed_precision_param, "set training.mixed_precision_param"
    if c.training.dtype == "bfloat16" and computed == "float32":
        rule = f"weights stored in {c.training.dtype} cannot be computed with in {computed}"
        yield _error(c, "training.dtype", rule, f'{fix} = "bfloat16"')
    if c.float8.enable and computed == "float32":
        rule = "results of float8 products are bfloat16, and training.mixed_precision_param is"
        yield _error(c, "float8.enable", f"{rule} {computed}", f'{fix} = "bfloat16"')


def _pipeline(c: JobConfig) -> Iterator[ConfigError]:
    if c.parallelism.pipeline_parallel_degree == 1:
        return
    if c.parallelism.fsdp_prefetch_layers > 1:
        rule = "a pipeline's stages stay gathered, so nothing is gathered ahead"
        yield _error(c, "parallelism.fsdp_prefetch_layers", rule, WITHOUT_PIPELINE)
    if c.parallelism.fsdp_reduce_gradients == "every_microbatch":
        rule = "a pipeline's schedule reduces gradients once, after its last microbatch"
        yield _error(c, "parallelism.fsdp_reduce_gradients", rule, WITHOUT_PIPELINE)


def _others(c: JobConfig) -> Iterator[ConfigError]:
    warmup, active = c.profiling.profiler_warmup, c.profiling.profiler_active
    if c.profiling.profile_freq < warmup + active:
        rule = f"is less than profiler_warmup {warmup} + profiler_active {active}"
        yield _error(c, "profiling.profile_freq", rule, "raise it to their sum or more")
    if c.training.attention_kernel == "cudnn" and c.training.deterministic:
        rule = "cuDNN's backward is not deterministic, and training.deterministic is true"
        yield _error(c, "training.attention_kernel", rule, 'use "flash"')


SOURCE_KEYS = " ".join(key for key in Source.model_fields if key != "dataset")


IDLE_BESIDE = {
    "parallelism.tensor_parallel_degree = 1": "enable_async_tensor_parallel",
    "parallelism.pipeline_parallel_degree = 1": "pipeline_parallel_schedule "
    "pipeline_parallel_stages_per_rank module_fqns_per_model_part",
    "training.mixed_precision_param = 'float32'": "fp32_modules",
    "training.datasets != []": SOURCE_KEYS,
    "validation.sample_prompts = []": "sample_tokens",
    "validation.datasets != []": SOURCE_KEYS,
    "optimizer.weight_decay = 0.0": "decay_norm_and_bias",
    "bad_steps.policy = 'stop'": "budget",
    "bad_steps.spike_std = 0.0": "spike_window",
    "activation_checkpoint.mode != 'selective'": "selective_ac_option saved_ops",
    "activation_checkpoint.selective_ac_option != 'op'": "saved_ops",
    "activation_checkpoint.mode != 'memory_budget'": "memory_budget",
    "checkpoint.keep_latest_k = 0": "keep_every_n_steps",
    "checkpoint.load_only = true": "interval keep_latest_k keep_every_n_steps keep_best async_mode "
    "on_save_failure enable_first_step_checkpoint last_save_model_only last_save_in_hf "
    "export_dtype",
    "metrics.enable_tensorboard = false": "save_tb_folder",
    "metrics.enable_wandb = false": "wandb_project wandb_entity wandb_name",
}
"""The value of a key that disables other keys of its section, and those keys."""

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
        "profiling.enable_profiling = false",
    ),
    (
        "checkpoint.export_dtype",
        lambda c: not (c.checkpoint.last_save_model_only or c.checkpoint.last_save_in_hf),
        "the last save is a whole checkpoint",
    ),
    (
        " ".join(f"optimizer.muon.{key}" for key in Muon.model_fields),
        lambda c: (
            {c.optimizer.name, *(group.optimizer for group in c.optimizer.groups)}
            <= {"AdamW", "Adam", None}
        ),
        "no optimizer of matrices is chosen",
    ),
    (
        "checkpoint.average.decay checkpoint.average.window_tokens",
        lambda c: not (c.checkpoint.enable or c.validation.enable),
        "the mean is neither saved nor validated",
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
    for condition, keys in IDLE_BESIDE.items():
        cause, sign, wanted = condition.split(" ", 2)
        here, section = shown(value_of(config, cause)), cause.split(".")[0]
        for key in keys.split() if (here == wanted) == (sign == "=") else ():
            reasons.setdefault(f"{section}.{key}", f"{cause} = {here}")
    for keys, is_met, why in IDLE_WHERE:
        for key in keys.split() if is_met(config) else ():
            reasons.setdefault(key, why)
    defaults = JobConfig()
    for key, why in reasons.items():
        value = value_of(config, key)
        if value != value_of(defaults, key):
            yield f"{key} = {shown(value)} has no effect: {why}"


def never_reached(config: JobConfig, steps: int) -> str:
    """Return a note if the warm-up takes longer than all steps of the job; or ""."""
    warmup = config.lr_scheduler.warmup_steps
    if warmup <= steps:
        return ""
    return (
        f"optimizer.lr = {config.optimizer.lr} is never reached: lr_scheduler.warmup_steps = "
        f"{warmup}, and the job has {steps}"
    )


def _switched_off(config: JobConfig) -> dict[str, str]:
    """Return the keys of sections that are off, and why; first weights are loaded all the same."""
    return {
        f"{name}.{key}": f"{name}.enable = false"
        for name, section in config
        if getattr(section, "enable", None) is False
        for key in type(section).model_fields
        if key not in ("enable", "average") and not key.startswith("initial_load")
    }


def check_writable(config: JobConfig) -> None:
    """Check that the folders that a job writes to are there, or can be made; leave no trace."""
    dump_folder, checkpoint = Path(config.job.dump_folder), config.checkpoint
    _check_folder("job.dump_folder", config.job.dump_folder, dump_folder)
    if checkpoint.saves:  # its own link may lead to another file system
        _check_folder("checkpoint.folder", checkpoint.folder, dump_folder / checkpoint.folder)


def _check_folder(key: str, value: str, folder: Path) -> None:
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    what = "not a" if os.path.exists(existing) else "a link to no"
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    is_first = os.environ.get("RANK", "0") == "0"  # others would make a folder each, on one server
    if is_writable and is_first and existing != folder.absolute():
        try:  # permissions do not tell: /proc takes no folder, nor does a quota that is used up
            TemporaryDirectory(dir=existing).cleanup()
        except OSError:
            is_writable = False
    check(
        is_writable,
        key,
        value,
        f"{existing} is {what} folder that can be written to",
        "name another folder",
    )


EXTRAS = {"wandb": "wandb", "torchao": "float8"}
"""Extras of pyproject.toml that install these packages."""


def check_installed(key: str, is_on: bool, package: str) -> None:
    """Check that the package that the option `key` needs is there."""
    check(
        not is_on or importlib.util.find_spec(package) is not None,
        key,
        True,
        f"{package} is not installed",
        f"pip install 'meshwright[{EXTRAS[package]}]'",
    )
