"""Rules between the keys of a config, on any mesh: contradictions, and keys without effect.

One table for each topic, by sections of the TOML. A contradiction is an error: add a `Rule`. A key
without effect, such as `pipeline_parallel_schedule` without a pipeline, is reported: add an `Idle`.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import inf

from meshwright.config.job_config import Checkpoint, JobConfig, suits_cpu_attention
from meshwright.config.optimizer import Muon
from meshwright.config.parallelism import Compile, Float8
from meshwright.config.rules import (
    Check,
    Facts,
    Idle,
    Row,
    Rule,
    given_while,
    idle_unless,
    idle_while,
    is_given,
)
from meshwright.config.section import Section
from meshwright.config.training import Source, Validation
from meshwright.models.table import DecoderSpec
from meshwright.system.errors import ConfigError, config_error

WITHOUT_PIPELINE = "leave it out, or set parallelism.pipeline_parallel_degree = 1"
ENABLE_CHECKPOINTS = "set checkpoint.enable = true"
WITHOUT_SENTRY = "leave [sentry] out"
ONE_OF_TWO = "leave one of the two out"
USE_INDUCTOR = 'set compile.enable = true and compile.backend = "inductor"'
EARLY_STEP = "optimizer.early_step_in_backward"
EXTRAS = {"wandb": "wandb", "torchao": "float8"}
"""Extras of pyproject.toml that install these packages."""


def _not_installed(key: str, package: str) -> Rule[Facts]:
    fix = f"pip install 'meshwright[{EXTRAS[package]}]'"
    is_missing = f"{package} is not installed"
    return given_while(key, lambda _, facts: package in facts.missing_packages, is_missing, fix)


def _one_of_two(key: str, other: str, says: str) -> Rule[Facts]:
    """Return the row of two keys of which only one may be given."""
    return given_while(key, lambda c, _: is_given(c, other), says, ONE_OF_TWO)


def _idle_if_off(section: type[Section], name: str) -> Idle[Facts]:
    """Return the row of a section that may be off; initial weights are loaded all the same."""
    keys = [key for key in section.model_fields if key not in ("enable", "average")]
    own = " ".join(key for key in keys if not key.startswith("initial_load"))
    return idle_while(f"{name}.enable", False, own)


SOURCE_KEYS = " ".join(key for key in Source.model_fields if key != "dataset")


def _decay_fits(config: JobConfig, _: Facts) -> Iterator[ConfigError]:
    schedule, steps = config.lr_scheduler, config.schedule_steps
    if schedule.name != "wsd":
        return
    if schedule.decay_ratio is not None and schedule.warmup_steps + config.num_decay_steps > steps:
        total = f"lr_scheduler.total_steps = {steps}" if schedule.total_steps else f"{steps}"
        yield config_error(
            "lr_scheduler.decay_ratio",
            schedule.decay_ratio,
            f"so many steps of decay do not fit in {total} after {schedule.warmup_steps} of "
            "warm-up",
            "lower it, or lr_scheduler.warmup_steps",
        )


SCHEDULE: tuple[Row[Facts], ...] = (
    Check(_decay_fits),
    _one_of_two(
        "lr_scheduler.decay_start",
        "lr_scheduler.decay_ratio",
        "lr_scheduler.decay_ratio = {lr_scheduler.decay_ratio} gives the start as well",
    ),
    Rule(
        "lr_scheduler.decay_start",
        lambda c, _: (
            c.lr_scheduler.name == "wsd"
            and c.lr_scheduler.decay_start is not None
            and c.lr_scheduler.decay_start < c.lr_scheduler.warmup_steps
        ),
        "lies within the warm-up of {lr_scheduler.warmup_steps} steps",
        "raise it, or lower lr_scheduler.warmup_steps",
    ),
    Rule(
        "lr_scheduler.total_steps",
        lambda c, _: c.schedule_steps < c.training.steps,
        "the schedule ends before training.steps = {training.steps}",
        "raise it, or leave it out",
    ),
    Idle(
        "lr_scheduler.decay_ratio lr_scheduler.decay_start lr_scheduler.decay_type",
        lambda c, _: c.lr_scheduler.name != "wsd",
        "the schedule differs from wsd",
    ),
    Idle(
        "lr_scheduler.total_steps",
        lambda c, _: c.lr_scheduler.name == "inverse_sqrt",
        "1 / sqrt(step) has no end",
    ),
    Idle(
        "lr_scheduler.decay_type lr_scheduler.min_lr_factor",
        lambda c, _: c.num_decay_steps == 0 and c.lr_scheduler.name == "wsd",
        "no step is left for a decay",
    ),
)

NOTHING_LOADED = "nothing is loaded while checkpoint.enable is false"
NO_INITIAL_PATH = "nothing is loaded: checkpoint.initial_load_path is not given"


def _has_no_checkpoints(config: JobConfig, _: Facts) -> bool:
    return not config.checkpoint.enable


def _has_no_initial_path(config: JobConfig, _: Facts) -> bool:
    return not config.checkpoint.initial_load_path


CHECKPOINTS: tuple[Row[Facts], ...] = (
    given_while("checkpoint.load_step", _has_no_checkpoints, NOTHING_LOADED, ENABLE_CHECKPOINTS),
    given_while("checkpoint.rewind_to", _has_no_checkpoints, NOTHING_LOADED, ENABLE_CHECKPOINTS),
    _one_of_two(
        "checkpoint.rewind_to",
        "checkpoint.load_step",
        "checkpoint.load_step = {checkpoint.load_step} names a checkpoint as well",
    ),
    given_while(
        "checkpoint.exclude_from_loading", _has_no_checkpoints, NOTHING_LOADED, ENABLE_CHECKPOINTS
    ),
    given_while(
        "checkpoint.keep_best",
        lambda c, _: not c.validation.enable,
        "without validation no checkpoint is the best",
        "set validation.enable = true, or leave it out",
    ),
    given_while(
        "job.max_run_seconds",
        _has_no_checkpoints,
        "the steps trained by then would be lost: checkpoint.enable is false",
        ENABLE_CHECKPOINTS,
    ),
    given_while(
        "job.max_run_seconds",
        lambda c, _: c.checkpoint.enable and c.checkpoint.load_only,
        "the steps trained by then would be lost: checkpoint.load_only is true",
        "set checkpoint.load_only = false",
    ),
    given_while(
        "checkpoint.initial_load_in_hf",
        _has_no_initial_path,
        NO_INITIAL_PATH,
        "name the folder there; or in model.flavor, which then gives dimensions and tokenizer too",
    ),
    given_while(
        "checkpoint.initial_load_upcycle_noise",
        _has_no_initial_path,
        NO_INITIAL_PATH,
        "name the dense model's folder there, or leave it out",
    ),
    given_while(
        "checkpoint.initial_load_new_mtp",
        _has_no_initial_path,
        NO_INITIAL_PATH,
        "leave it out: all weights are new",
    ),
    given_while(
        "checkpoint.initial_load_new_mtp",
        lambda c, _: is_given(c, "checkpoint.initial_load_upcycle_noise"),
        "is not known to work with checkpoint.initial_load_upcycle_noise",
        "start with model.args.mtp_depth = 0, and add the layers in a later job",
    ),
    _one_of_two(
        "checkpoint.average.window_tokens",
        "checkpoint.average.decay",
        "checkpoint.average.decay gives the mean as well",
    ),
    _idle_if_off(Checkpoint, "checkpoint"),
    idle_while("checkpoint.keep_latest_k", 0, "keep_every_n_steps"),
    idle_while(
        "checkpoint.load_only",
        True,
        "interval keep_latest_k keep_every_n_steps keep_best async_mode on_save_failure "
        "enable_first_step_checkpoint last_save_model_only last_save_in_hf export_dtype",
    ),
    Idle(
        "checkpoint.export_dtype",
        lambda c, _: not (c.checkpoint.last_save_model_only or c.checkpoint.last_save_in_hf),
        "the last save is a full checkpoint",
    ),
    Idle(
        "checkpoint.export_mtp",
        lambda c, _: not c.checkpoint.last_save_in_hf,
        "nothing is exported",
    ),
    Idle(
        "checkpoint.average.decay checkpoint.average.window_tokens",
        lambda c, _: not (c.checkpoint.enable or c.validation.enable),
        "the mean is neither saved nor validated",
    ),
)

TOO_EARLY = f"{EARLY_STEP} updates weights before it is known whether the step is bad"


def _has_mup(facts: Facts) -> bool:
    return getattr(facts.model, "mup_base_dim", None) is not None


def _optimizers(config: JobConfig) -> set[str]:
    optimizer = config.optimizer
    return {optimizer.name} | {group.optimizer for group in optimizer.groups if group.optimizer}


OPTIMIZER: tuple[Row[Facts], ...] = (
    given_while(
        EARLY_STEP,
        lambda c, _: c.training.max_norm != inf,
        "gradients are gone before their norm is known, so training.max_norm = {training.max_norm} "
        "cannot be kept",
        "set training.max_norm = inf",
    ),
    Rule(
        "parallelism.fsdp_reduce_gradients",
        lambda c, _: (
            c.optimizer.early_step_in_backward
            and c.parallelism.fsdp_reduce_gradients == "every_microbatch"
        ),
        f"{EARLY_STEP} would update with the gradients of one microbatch",
        ONE_OF_TWO,
    ),
    _one_of_two("bad_steps.policy", EARLY_STEP, TOO_EARLY),
    _one_of_two("bad_steps.spike_std", EARLY_STEP, TOO_EARLY),
    _one_of_two(
        "metrics.grad_norm_by_group",
        EARLY_STEP,
        f"{EARLY_STEP} frees each gradient before the norms are taken",
    ),
    _one_of_two(
        "metrics.layer_stats_freq",
        EARLY_STEP,
        f"{EARLY_STEP} frees each gradient before its RMS is taken",
    ),
    Rule(
        "optimizer.name",
        lambda c, facts: _has_mup(facts) and ", ".join(sorted(_optimizers(c) - {"AdamW"})),
        "model.args.mup_base_dim has rules for AdamW only, not for {detail}",
        "leave out one of the two",
        needs="model",
    ),
    given_while(
        "checkpoint.initial_load_in_hf",
        lambda _, facts: _has_mup(facts),
        "these weights are of a model without muP, and model.args.mup_base_dim is given",
        "leave out one of the two",
        needs="model",
    ),
    idle_while("optimizer.weight_decay", 0.0, "decay_norm_and_bias"),
    Idle(
        " ".join(f"optimizer.muon.{key}" for key in Muon.model_fields),
        lambda c, _: _optimizers(c) <= {"AdamW", "Adam"},
        "no optimizer of matrices is chosen",
    ),
    idle_while("bad_steps.policy", "stop", "budget"),
    idle_while("bad_steps.spike_std", 0.0, "spike_window"),
)


def _wants_budget(config: JobConfig) -> bool:
    return config.activation_checkpoint.mode == "memory_budget"


def _compiles_by(config: JobConfig, *backends: str) -> bool:
    """Return whether one of the `backends` compiles; "auto" compiles where an option needs it."""
    return config.compile.enable is not False and config.compile.backend in backends


COMPILER: tuple[Row[Facts], ...] = (
    Rule(
        "activation_checkpoint.mode",
        lambda c, _: _wants_budget(c) and not _compiles_by(c, "inductor", "aot_eager"),
        "the compiler chooses, and backend eager does not",
        f"{USE_INDUCTOR}, or choose a different mode",
    ),
    Rule(
        "activation_checkpoint.mode",
        lambda c, _: _wants_budget(c) and c.float8.enable,
        "is not known to work with float8.enable",
        "choose a different mode",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        lambda c, _: c.overlaps_tensor_parallel and not _compiles_by(c, "inductor"),
        "it needs inductor, and nothing is compiled by inductor",
        f"{USE_INDUCTOR}, or leave it out",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        lambda c, _: c.overlaps_tensor_parallel and c.float8.enable,
        "is not known to work with float8.enable",
        ONE_OF_TWO,
    ),
    _idle_if_off(Compile, "compile"),
    idle_while("parallelism.tensor_parallel_degree", 1, "enable_async_tensor_parallel"),
    idle_unless("activation_checkpoint.mode", "selective", "selective_ac_option saved_ops"),
    idle_unless("activation_checkpoint.selective_ac_option", "op", "saved_ops"),
    idle_unless("activation_checkpoint.mode", "memory_budget", "memory_budget"),
    Idle(
        "compile.cpu_attention",
        lambda c, _: not suits_cpu_attention(c.training, c.parallelism),
        "it is for attention without mask_documents and context parallelism",
    ),
)

PRECISION: tuple[Row[Facts], ...] = (
    given_while(
        "training.dtype",
        lambda c, _: c.training.mixed_precision_param == "float32",
        "weights stored in bfloat16 cannot be computed with in float32",
        'set training.mixed_precision_param = "bfloat16"',
    ),
    given_while(
        "float8.enable",
        lambda c, _: c.training.mixed_precision_param == "float32",
        "results of float8 products are bfloat16, and training.mixed_precision_param is float32",
        'set training.mixed_precision_param = "bfloat16"',
    ),
    _not_installed("float8.enable", "torchao"),
    _idle_if_off(Float8, "float8"),
    idle_while("training.mixed_precision_param", "float32", "fp32_modules"),
)

MESH: tuple[Row[Facts], ...] = (
    given_while(
        "parallelism.fsdp_prefetch_layers",
        lambda c, _: c.parallelism.pipeline_parallel_degree > 1,
        "a pipeline's stages stay gathered, so nothing is gathered ahead",
        WITHOUT_PIPELINE,
    ),
    Rule(
        "parallelism.fsdp_reduce_gradients",
        lambda c, _: (
            c.parallelism.pipeline_parallel_degree > 1
            and c.parallelism.fsdp_reduce_gradients == "every_microbatch"
        ),
        "a pipeline's schedule reduces gradients once, after its last microbatch",
        WITHOUT_PIPELINE,
    ),
    idle_while(
        "parallelism.pipeline_parallel_degree",
        1,
        "pipeline_parallel_schedule pipeline_parallel_stages_per_rank module_fqns_per_model_part",
    ),
    Idle(
        "parallelism.fsdp_reshard_after_forward parallelism.fsdp_prefetch_layers "
        "parallelism.fsdp_cpu_backend parallelism.fsdp_reduce_gradients "
        "training.mixed_precision_reduce",
        lambda c, _: not c.has_fsdp,
        "one rank with float32 weights and gradients uses no FSDP",
    ),
    Idle(
        "parallelism.fsdp_reduce_gradients",
        lambda c, _: c.num_microbatches == 1,
        "a step has one microbatch",
    ),
)


def _loss_weights_differ(config: JobConfig, _: Facts) -> Iterator[ConfigError]:
    weights = [source.loss_weight for source in config.training.datasets]
    if len({*weights}) == 1 and weights[0] != 1:
        yield config_error(
            "training.datasets.0.loss_weight",
            weights[0],
            "every dataset has this weight, and only their ratio counts",
            "leave it out, or give datasets different ones",
        )


def _suits_mtp(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Further tokens are predicted without options that no proof covers next to them."""
    training, freq = config.training, config.metrics.layer_stats_freq
    clip = config.optimizer.qk_clip_threshold
    mup = getattr(facts.model, "mup_base_dim", 0)
    weights = {source.loss_weight for source in training.datasets} - {1.0}
    used: dict[str, tuple[object, bool]] = {
        "training.loss": (training.loss, training.loss != JobConfig().training.loss),
        "training.datasets.0.loss_weight": (max(weights, default=1.0), bool(weights)),
        "metrics.layer_stats_freq": (freq, bool(freq)),
        "optimizer.qk_clip_threshold": (clip, clip is not None),
        "sentry.interval": (config.sentry.interval, bool(config.sentry.interval)),
        "model.args.mup_base_dim": (mup, bool(mup)),
    }
    for key, (value, is_used) in used.items():
        if is_used and facts.spec.mtp_depth:
            rule = "is not known to work with layers for MTP"
            yield config_error(key, value, rule, "leave it out, or set model.args.mtp_depth = 0")


def _suits_qk_clip(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """QK-clip needs logits that are known, and that follow from weights that it may change."""
    threshold, frozen = config.optimizer.qk_clip_threshold, config.model.frozen
    if threshold is None:
        return
    attentions = facts.spec.attentions
    changed = [
        f"layers.{layer}.attention.{name}"
        for layer, one in attentions.items()
        for name in one.logit_rows
    ]
    kept = [name for name in changed if any(fnmatchcase(name, pattern) for pattern in frozen)]
    missing = [name for name in changed if name not in facts.spec.parameters]
    specs = attentions.values()
    reasons = {
        "the model normalizes queries and keys, so their weights don't make logits large": any(
            one.qk_norm for one in specs
        ),
        "the model caps its logits": any(one.soft_cap is not None for one in specs),
        "no layer has attention": not attentions,
        "the logits of a core of your own aren't known": any(
            one.has_own_core or "core" not in one.bare_modules for one in specs
        ),
        f"the model has no {missing[:1]}, which it would change": bool(missing),
        f"model.frozen has {kept[:1]}, which it would change": bool(kept),
        f"{EARLY_STEP} updates before a step is known to be good": (
            config.optimizer.early_step_in_backward
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            key = "optimizer.qk_clip_threshold"
            yield config_error(key, threshold, reason, "leave it out")


OTHERS: tuple[Row[Facts], ...] = (
    Check(_loss_weights_differ),
    Check(_suits_mtp, needs="model"),
    Check(_suits_qk_clip, needs="model"),
    idle_while("optimizer.qk_clip_threshold", None, "qk_clip_interval"),
    Rule(
        "profiling.profile_freq",
        lambda c, _: (
            c.profiling.profile_freq < c.profiling.profiler_warmup + c.profiling.profiler_active
        ),
        "is less than profiler_warmup {profiling.profiler_warmup} + profiler_active "
        "{profiling.profiler_active}",
        "raise it to their sum or more",
    ),
    Rule(
        "training.attention_kernel",
        lambda c, _: c.training.attention_kernel == "cudnn" and c.training.deterministic,
        "cuDNN's backward is not deterministic, and training.deterministic is true",
        'use "flash"',
    ),
    Rule(
        "training.attention_kernel",
        lambda c, _: (
            c.training.attention_kernel == "fa3" and c.parallelism.context_parallel_degree > 1
        ),
        "isn't known to give context parallelism the logarithms of its sums",
        'use "auto"',
    ),
    Rule(
        "training.attention_kernel",
        lambda c, _: (
            c.training.attention_kernel == "cudnn"
            and c.parallelism.context_parallel_degree > 1
            and c.sentry.interval > 0
        ),
        "cuDNN's backward is not deterministic, and the sentry compares bits of it",
        'use "auto"',
    ),
    Idle(
        "training.mtp_loss_weight",
        lambda _, facts: facts.model is not None and not facts.model.mtp_depth,
        "model.args.mtp_depth = 0",
    ),
    _not_installed("metrics.enable_wandb", "wandb"),
    _idle_if_off(Validation, "validation"),
    given_while(
        "sentry.interval",
        lambda c, _: c.num_data_ranks == 1,
        "there is one data-parallel rank, so no other one computes the same",
        f"{WITHOUT_SENTRY}, or set parallelism.data_parallel_shard_degree = 2 or more",
        needs="world_size",
    ),
    given_while(
        "sentry.interval",
        lambda c, _: c.parallelism.expert_parallel_degree > 1,
        "with expert parallelism ranks compute rows of each other, so it isn't known who was wrong",
        f"{WITHOUT_SENTRY}, or set parallelism.expert_parallel_degree = 1",
    ),
    idle_unless("training.datasets", [], SOURCE_KEYS),
    idle_unless("validation.datasets", [], SOURCE_KEYS),
    idle_while("validation.sample_prompts", [], "sample_tokens"),
    Idle(
        "training.attention_kernel",
        lambda c, _: c.training.mask_documents,
        "documents have their own kernel",
    ),
    Idle(
        "training.attention_kernel",
        lambda _, facts: (
            facts.model is not None
            and all(one.needs_mask for one in facts.spec.attentions.values())
        ),
        "every layer has a window, a soft cap or sinks, for which GPUs have flex attention",
    ),
    idle_while("metrics.enable_tensorboard", False, "save_tb_folder"),
    idle_while("metrics.enable_wandb", False, "wandb_project wandb_entity wandb_name"),
    Idle(
        "profiling.profile_freq",
        lambda c, _: not (c.profiling.enable_profiling or c.profiling.enable_memory_snapshot),
        "profiling.enable_profiling = false",
    ),
)

RULES = (*SCHEDULE, *CHECKPOINTS, *OPTIMIZER, *COMPILER, *PRECISION, *MESH, *OTHERS)
"""Every rule that needs no more than the config."""


def never_reached(config: JobConfig, steps: int) -> str:
    """Return a note if the warm-up takes longer than all steps of the job; or ""."""
    warmup = config.lr_scheduler.warmup_steps
    if warmup <= steps:
        return ""
    return (
        f"optimizer.lr = {config.optimizer.lr} is never reached: lr_scheduler.warmup_steps = "
        f"{warmup}, and the job has {steps}"
    )


def scale_of_microbatch(config: JobConfig) -> str:
    """Return a note if results depend on the mesh beyond rounding in sums; or ""."""
    if not config.float8.enable or config.float8.recipe_name != "tensorwise":
        return ""
    return (
        "float8.recipe_name = 'tensorwise': a rank's tokens of a microbatch have one scale, so "
        "losses depend on the mesh and on training.local_batch_size; those of rowwise don't"
    )


def long_window(config: JobConfig, spec: DecoderSpec) -> str:
    """Return a note if a window leaves out no token, since no sequence is longer; or ""."""
    longest = max((one.window or 0 for one in spec.attentions.values()), default=0)
    seq_len = config.training.seq_len
    if longest < seq_len:
        return ""
    return (
        f"model.args.window = {longest} leaves out no token, since training.seq_len = {seq_len}; "
        f"a window of less than {seq_len} would"
    )
