"""Every check of a job that needs no rank and no memory.

Free of torch: the launcher calls it first, so a mistake is reported at once. Every rank
calls it again, for users who start torchrun themselves.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.checkpoint import commit, find
from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.checkpoint.manifest import OPTIMIZER, Manifest, left_out, read_manifest
from meshwright.checkpoint.resume_diff import ResumeDiff, find_resume_diff
from meshwright.config.combinations import (
    check_contradictions,
    check_installed,
    check_writable,
    idle_options,
    never_reached,
)
from meshwright.config.job_config import JobConfig, changed
from meshwright.config.stages import error_of_stage, staged
from meshwright.datasets.identity import OF_DOCUMENTS
from meshwright.datasets.named_sources import (
    check_budgets,
    check_mixture,
    check_sample_prompts,
    check_sources,
    check_template,
    check_validation,
    idle_source_options,
    sympy_note,
    tokenizer_notes,
    validation_note,
)
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import Ends
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family
from meshwright.parallelisms.rules import memory, stages
from meshwright.parallelisms.rules.compile_choice import check_budget, resolve_compile
from meshwright.parallelisms.rules.degrees import (
    DEGREES,
    ParallelDims,
    check_divisible,
    check_experts,
    resolve_auto_values,
)
from meshwright.parallelisms.rules.precision import (
    check_fp32_modules,
    find_float8_layers,
    find_fp32_modules,
    resolve_type,
)
from meshwright.system.errors import ConfigError, Mistakes, check
from meshwright.system.modules import code_of
from meshwright.train.optim.registry import (
    average_decay,
    check_optimizers,
    find_names,
    has_other_state,
    idle_groups,
    names_by_group,
)
from meshwright.train.resolve_model import extend_by, resolve_model


@dataclass(frozen=True)
class ResolvedJob:
    """A job that can be run."""

    config: JobConfig
    """Without -1: every value that follows from others is filled in."""
    type_line: str
    """How `training.mixed_precision_param = "auto"` was decided, as `resolve_type` returns it."""
    compile_line: str
    """How `compile.enable = "auto"` was decided, for the log; as `resolve_compile` returns it."""
    batch_line: str
    """For the log: that the batch, and so the result, follows the number of ranks; or ""."""
    family: Family
    model_args: DecoderArgs
    tokenizer: Tokenizer
    frozen: frozenset[str]
    """Names of the parameters that are not trained."""
    pipeline_modules: list[list[str]]
    """Modules of each stage of the pipeline; without one, a single stage has them all."""
    fp32_modules: list[str]
    """Names of the modules that `training.fp32_modules` matches."""
    float8_layers: list[str]
    """Names of the layers that multiply in float8."""
    least_bytes: dict[str, float]
    """Memory that the rank with most parameters surely needs on its device, by purpose."""
    own_code: str
    """Hash of the module of `experimental.custom_import`, as it runs here; "": there is none."""
    resume_step: int = 0
    """Step of the checkpoint to resume from; 0: there is none."""
    stage_number: int = 1
    """Of the job, from 1 on; `config` is its own."""
    starts_after: int = 0
    """The last step of the stage before it."""
    next_stage: "ResolvedJob | None" = None
    """The stage after it."""
    given: JobConfig | None = None
    """The config of the whole job, with -1 and "auto" where they were given."""
    is_inherited: Callable[[str], bool] = lambda key: False
    """Whether a preset gave a key: if it has no effect, the user has nothing to do."""
    data_steps: int = 0
    """Step before which `training.max_epochs` ends the data; 0: not known."""

    @property
    def training_stages(self) -> "list[ResolvedJob]":
        """This stage and the later ones."""
        return [self] if self.next_stage is None else [self, *self.next_stage.training_stages]

    def stage_at(self, step: int) -> "ResolvedJob":
        """Return the stage that continues after `step`."""
        is_over = step >= self.config.training.steps
        return self.next_stage.stage_at(step) if is_over and self.next_stage is not None else self

    def begins_stage_with(self, saved: Manifest) -> bool:
        """Return whether the stage begins with a checkpoint, which the stage before it has saved;
        `ConfigError` if the checkpoint is of another stage, and does not end it."""
        step, was = saved["step"], saved.get("stage", 1)
        is_end = was < self.stage_number and step == self.starts_after
        if was == self.stage_number or is_end:
            return is_end
        key, here = "training.stages", f"step {step} is one of stage {self.stage_number}"
        message = f"{key}: {here}, and its checkpoint was saved in stage {was}"
        fix = "give earlier stages the ends that they had, or use another job.dump_folder"
        raise ConfigError(key, f"{message}\n  fix: {fix}")

    @property
    def steps(self) -> int:
        """The last step, as far as that is known."""
        steps = self.config.training.steps
        return min(steps, self.data_steps or steps)

    @property
    def dims(self) -> ParallelDims:
        """The degrees of the mesh."""
        parallelism, has_experts = self.config.parallelism, bool(self.model_args.table.mixtures)
        degrees = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
        return ParallelDims(**degrees | {"ep": degrees["ep"] * has_experts})

    def pipeline_stages_of(self, rank: int) -> list[int]:
        """Return the stages of the pipeline that `rank` has."""
        place = rank // self.dims.first_ranks.step
        schedule = self.config.parallelism.pipeline_parallel_schedule
        return stages.stages_of_rank(place, self.dims.pp, len(self.pipeline_modules), schedule)

    def modules_of(self, rank: int) -> list[str]:
        """Return the modules of all stages of `rank`."""
        return [
            name for index in self.pipeline_stages_of(rank) for name in self.pipeline_modules[index]
        ]

    def num_parameters(self, rank: int) -> int:
        """Return the parameters of all stages of `rank`, over its tensor-parallel ranks."""
        return sum(p.numel for p in self.model_args.table.of_blocks(self.modules_of(rank)))

    @property
    def checkpoint_folder(self) -> Path:
        """Where the job's checkpoints are."""
        return Path(self.config.job.dump_folder) / self.config.checkpoint.folder

    @property
    def needs_folder(self) -> bool:
        """Whether no other job may use that folder meanwhile: this one saves there, or writes its
        records beside it. By a path or a link, jobs that only read may share another's."""
        folder = Path(os.path.realpath(self.checkpoint_folder))
        is_beside = folder.is_relative_to(os.path.realpath(self.config.job.dump_folder))
        return self.config.checkpoint.saves or is_beside

    @property
    def data_identity(self) -> dict[str, object]:
        """Everything, apart from the documents, that determines the sample stream."""
        training = self.config.training
        documents = training.model_dump(include=OF_DOCUMENTS)
        named: dict[str, object] = {f"training.{key}": documents[key] for key in documents}
        if training.datasets:
            places = {"dataset_path", "dataset_format", "dataset_revision"}
            named = {
                f"training.datasets.{number}": source.model_dump(exclude=places)
                for number, source in enumerate(training.datasets)
            }
        return named | {
            "training.validation_fraction": training.validation_fraction,
            "training.packing": training.packing,
            "training.seq_len": training.seq_len,
            "training.seed": training.seed,
            "model.tokenizer_path": self.tokenizer.fingerprint,
        }

    @property
    def notes(self) -> list[str]:
        """Lines that `meshwright check` prints, and the job when it starts."""
        slow = [
            never_reached(stage.config, self.training_stages[-1].steps)
            for stage in self.training_stages
        ]
        lines = (
            self.batch_line,
            validation_note(self.config),
            sympy_note(self.config),
            *tokenizer_notes(self.tokenizer, self.config),
            self.type_line,
            self.compile_line,
            min(slow),
        )
        return [*filter(None, lines), *self.idle_options.values()]

    @property
    def idle_options(self) -> dict[str, str]:
        """Options that have no effect in this stage or a later one, and a sentence why."""
        names, groups = list(self.model_args.table.parameters), self.config.optimizer.groups
        found = (
            *idle_options(self.config),
            *idle_source_options(self.config),
            *idle_groups(groups, names, self.frozen),
        )
        lines = {line.partition(" = ")[0]: line for line in found}
        later = lines if self.next_stage is None else self.next_stage.idle_options
        return {k: line for k, line in lines.items() if k in later and not self.is_inherited(k)}


def resolve(
    config: JobConfig,
    world_size: int,
    *,
    is_gpu: bool = False,
    looks_at_files: bool = True,
    checks_memory: bool = True,
    is_inherited: Callable[[str], bool] = lambda key: False,
) -> ResolvedJob:
    """Check `config` for a job of `world_size` ranks; each of its stages.

    Args:
        is_gpu: ranks train on GPUs, as far as is known here.
        looks_at_files: also check the checkpoint to resume from, or the weights to start from. The
            ranks of a job leave it to the first, once they can talk.
        checks_memory: refuse a job that surely does not fit `job.device_memory_gib`.
        is_inherited: as the plan's.

    Returns:
        The plan of the stage that the job continues with, as far as files were looked at.

    Raises:
        ConfigError: for the first thing that would keep it from running.
    """
    plans, plan = list[ResolvedJob](), None
    for number, one in enumerate(staged(config)):
        try:
            found = _resolve_stage(one, world_size, is_gpu, looks_at_files, checks_memory)
        except ConfigError as error:
            raise error_of_stage(error, config, number) from None
        starts_after = plans[-1].config.training.steps if plans else 0
        plans.append(replace(found, stage_number=number + 1, starts_after=starts_after))
    for found in reversed(plans):
        plan = replace(found, next_stage=plan, given=config, is_inherited=is_inherited)
    assert plan is not None
    return _look_at_files(plan) if looks_at_files else plan


def _resolve_stage(
    config: JobConfig, world_size: int, is_gpu: bool, looks_at_files: bool, checks_memory: bool
) -> ResolvedJob:
    """Check one stage, apart from the checkpoint that it continues from."""
    tokenizer = check_alone(config, looks_at_files=looks_at_files)
    follows_ranks = config.training.global_batch_size == -1 and world_size > 1
    config = resolve_auto_values(config, world_size, stages.num_stages(config.parallelism))
    config, type_line = resolve_type(config, is_gpu=is_gpu)
    family, model_args = resolve_model(config)
    config = changed(config, {"model": {"name": family.name}})
    check_divisible(config, model_args.table)
    check_experts(config, model_args.table)
    fp32_modules = find_fp32_modules(config, model_args)
    config, compile_line = resolve_compile(config, model_args, fp32_modules, is_gpu=is_gpu)
    check_fp32_modules(config, fp32_modules, model_args.table)
    check_budget(config, model_args.table, is_gpu=is_gpu)
    stage_modules = stages.plan_pipeline(config, model_args.table)
    float8_layers = find_float8_layers(config, model_args.table, fp32_modules)
    names, patterns = list(model_args.table.parameters), config.model.frozen
    frozen = frozenset[str]().union(*(find_names("model.frozen", one, names) for one in patterns))
    check(len(frozen) < len(names), "model.frozen", patterns, "leaves no parameter to train")
    load = memory.heaviest_load(config, model_args.table, stage_modules, frozen)
    config = memory.choose_reduction(config, load)
    least_bytes = memory.least_memory(config, load)
    if config.job.device_memory_gib and checks_memory:
        memory.check_memory(config, least_bytes, config.job.device_memory_gib)
    names_by_group(config.optimizer.groups, names)
    check_optimizers(config.optimizer, model_args.table.parameters)
    check_budgets(config.training)
    why_not = family.hf.why_not(model_args) if config.checkpoint.last_save_in_hf else ""
    check(not why_not, "checkpoint.last_save_in_hf", True, why_not, "leave it out")
    average_decay(config)
    check(
        tokenizer.vocab_size <= model_args.vocab_size,
        "model.tokenizer_path",
        config.model.tokenizer_path,
        f"its vocabulary of {tokenizer.vocab_size} is larger than the model's, "
        f"{model_args.vocab_size}",
        f"set model.args.vocab_size = {tokenizer.vocab_size}",
    )
    batch = config.training.global_batch_size
    batch_line = (
        f"training.global_batch_size = -1: the batch follows the number of ranks, here {batch} "
        f"sequences per step; set it to {batch} for the same result on any mesh"
    )
    return ResolvedJob(
        config=config,
        type_line=type_line,
        compile_line=compile_line,
        batch_line=batch_line if follows_ranks else "",
        family=family,
        model_args=model_args,
        tokenizer=tokenizer,
        frozen=frozen,
        pipeline_modules=stage_modules,
        fp32_modules=fp32_modules,
        float8_layers=float8_layers,
        least_bytes=least_bytes,
        own_code=code_of(config.experimental.custom_import),
    )


def _look_at_files(plan: ResolvedJob) -> ResolvedJob:
    """Check the checkpoint to resume from, or the weights to start from; return the plan of its
    stage, with the step."""
    config = plan.config.checkpoint
    choice = find.choose(plan.checkpoint_folder, config.load_step) if config.enable else None
    if choice is None:
        is_tie_given = plan.config.model.gives_tie
        check_initial(config, plan.model_args, plan.family, is_tie_given=is_tie_given)
        return plan
    checkpoint, manifest, _ = choice
    plan = replace(plan.stage_at(manifest["step"]), resume_step=manifest["step"])
    diff = resume_diff(plan, manifest)
    diff.check()
    parameters = {n: p for n, p in plan.model_args.table.parameters.items() if n not in plan.frozen}
    optimizer, saved = plan.config.optimizer, manifest["config"].get("optimizer", {})
    check(
        diff.is_done
        or OPTIMIZER in left_out(config, manifest)
        or not has_other_state(optimizer, saved, parameters),
        "optimizer.name",
        optimizer.name,
        f"checkpoint {checkpoint} was saved with another optimizer",
        'use that, or begin with a fresh one: checkpoint.exclude_from_loading = ["optimizer"]',
    )
    return plan


def check_alone(config: JobConfig, *, looks_at_files: bool = True) -> Tokenizer:
    """Check values that need no others, and rules between keys; return the tokenizer.

    Args:
        looks_at_files: also at the first row of local data.

    Raises:
        ConfigError: for all faults together.
    """
    mistakes = Mistakes()
    with mistakes.collect():
        check_contradictions(config)
    with mistakes.collect():
        resolve_model(config)
    with mistakes.collect():
        tokenizer = check_data(config, looks_at_files=looks_at_files)
    with mistakes.collect():
        check_installed("metrics.enable_wandb", config.metrics.enable_wandb, "wandb")
    with mistakes.collect():
        check_installed("float8.enable", config.float8.enable, "torchao")
    with mistakes.collect():
        check_writable(config)
    mistakes.check()
    return tokenizer


def check_data(config: JobConfig, *, looks_at_files: bool = True) -> Tokenizer:
    """Check the data as far as possible without reading it, as `check_alone` does."""
    extend_by(config.experimental.custom_import)
    mistakes = Mistakes()
    with mistakes.collect():
        model = config.model
        tokenizer = build_tokenizer(model.tokenizer_path, Ends(model.bos_token, model.eos_token))
        check_template(config.training, model)
    with mistakes.collect():
        check_sources(config.training, "training", looks_at_files=looks_at_files)
        check_mixture(config.training.datasets)
    with mistakes.collect():
        check_validation(config, looks_at_files=looks_at_files)
    mistakes.check()
    if config.validation.enable:
        check_sample_prompts(config.validation, tokenizer, config.training.seq_len)
    return tokenizer


def resume_diff(plan: ResolvedJob, manifest: Manifest | None = None) -> ResumeDiff:
    """Return how the job differs from the one that saved its checkpoint, whose manifest this is."""
    checkpoint = commit.step_folder(plan.checkpoint_folder, plan.resume_step)
    manifest = read_manifest(checkpoint) if manifest is None else manifest
    job = plan.config, plan.model_args, plan.data_identity, plan.frozen, plan.own_code
    return find_resume_diff(
        manifest, checkpoint, *job, begins_stage=plan.begins_stage_with(manifest)
    )
