"""Makes a resolved job of a config and the facts: a pure function. Free of torch.

The launcher calls it first, so that a mistake is reported at once; every rank calls it again, with
more facts.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.checkpoint.manifest import OPTIMIZER, Manifest, excluded_parts
from meshwright.checkpoint.resume_diff import ResumeDiff, find_resume_diff
from meshwright.checkpoint.store import Saved
from meshwright.config.changes import changed
from meshwright.config.combinations import long_window, never_reached, scale_of_microbatch
from meshwright.config.job_config import JobConfig, Update
from meshwright.config.rules import Choice, broken_rules, check_rules, idle_keys
from meshwright.config.stages import error_of_stage, staged
from meshwright.datasets.identity import OF_DOCUMENTS
from meshwright.datasets.named_sources import (
    idle_source_options,
    sympy_note,
    tokenizer_notes,
    validation_note,
)
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family
from meshwright.parallelisms.rules import compile_choice, degrees, memory, precision, stages
from meshwright.parallelisms.rules.degrees import DEGREES, ParallelDims
from meshwright.system.errors import ConfigError, Mistakes, check
from meshwright.train.facts import JobFacts
from meshwright.train.optim.registry import has_other_state, idle_groups
from meshwright.train.rules import RULES, find_frozen

OPEN_KEYS = {
    "parallelism": ("data_parallel_shard_degree", "fsdp_reduce_gradients"),
    "training": ("global_batch_size", "mixed_precision_param"),
    "compile": ("enable",),
}
"""The keys that `resolve` fills in for -1 or "auto", by section."""


@dataclass(frozen=True)
class ResolvedJob:
    """A job that can be run."""

    config: JobConfig
    """Without -1 and "auto": every value that follows from others is filled in."""
    written: JobConfig
    """The config of the whole job, with -1 and "auto" where they were given."""
    facts: JobFacts
    reasons: Mapping[str, str]
    """For the log: how a key that was left open was filled in, where that is worth a line."""
    family: Family
    model_args: DecoderArgs
    tokenizer: Tokenizer
    frozen: frozenset[str]
    """Names of the parameters that aren't trained."""
    pipeline_modules: list[list[str]]
    """Modules of each stage of the pipeline; without one, a single stage has them all."""
    fp32_modules: list[str]
    """Names of the modules that `training.fp32_modules` matches."""
    float8_layers: list[str]
    """Names of the layers that multiply in float8."""
    least_bytes: dict[str, float]
    """Memory that the rank with most parameters surely needs on its device, by purpose."""
    own_code: str
    """As the facts'."""
    resume_step: int = 0
    """Step of the checkpoint to resume from; 0: there is none."""
    resume_diff: ResumeDiff | None = None
    """How the job differs from the one that saved that checkpoint; None: there is none."""
    stage_number: int = 1
    """Of the job, from 1 on; `config` is its own."""
    starts_after: int = 0
    """The last step of the stage before it."""
    next_stage: "ResolvedJob | None" = None
    """The stage after it."""
    data_steps: int = 0
    """Step before which `training.max_epochs` ends the data; 0: not known."""

    @property
    def training_stages(self) -> "list[ResolvedJob]":
        """This stage and the later ones."""
        return [self] if self.next_stage is None else [self, *self.next_stage.training_stages]

    @property
    def is_only_stage(self) -> bool:
        """Whether the job has no other stage, earlier or later."""
        return self.stage_number == 1 and self.next_stage is None

    def stage_at(self, step: int) -> "ResolvedJob":
        """Return the stage that continues after `step`."""
        is_over = step >= self.config.training.steps
        return self.next_stage.stage_at(step) if is_over and self.next_stage is not None else self

    def begins_stage_with(self, saved: Manifest) -> bool:
        """Return whether the stage starts with a checkpoint, which the stage before it has saved;
        `ConfigError` if the checkpoint is of another stage, and doesn't end it."""
        step, was = saved["step"], saved.get("stage", 1)
        is_end = was < self.stage_number and step == self.starts_after
        if was == self.stage_number or is_end:
            return is_end
        key, here = "training.stages", f"step {step} is one of stage {self.stage_number}"
        message = f"{key}: {here}, and its checkpoint was saved in stage {was}"
        fix = "give earlier stages the ends that they had, or use another job.dump_folder"
        raise ConfigError(key, f"{message}\n  fix: {fix}")

    @property
    def filled_in(self) -> Update:
        """The values of the keys that a config may leave open, as plain data."""
        return {
            name: {key: getattr(getattr(self.config, name), key) for key in keys}
            for name, keys in OPEN_KEYS.items()
        }

    @property
    def steps(self) -> int:
        """The last step, as far as that is known."""
        steps = self.config.training.steps
        return min(steps, self.data_steps or steps)

    @property
    def dims(self) -> ParallelDims:
        """The degrees of the mesh."""
        parallelism = self.config.parallelism
        degrees = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
        if not self.model_args.table.mixtures:
            degrees["ep"] = 0
        return ParallelDims(**degrees)

    def pipeline_stages_of(self, rank: int) -> list[int]:
        place = rank // self.dims.first_ranks.step
        schedule = self.config.parallelism.pipeline_parallel_schedule
        return stages.stages_of_rank(place, self.dims.pp, len(self.pipeline_modules), schedule)

    def modules_of(self, rank: int) -> list[str]:
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
        records next to it. By a path or a link, jobs that only read may share another's."""
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
            others = {"dataset_path", "dataset_format", "dataset_revision", "loss_weight"}
            named = {
                f"training.datasets.{number}": source.model_dump(exclude=others)
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
        longest = max(self.training_stages, key=lambda stage: stage.config.training.seq_len)
        lines = (
            self.reasons["training.global_batch_size"],
            validation_note(self.config),
            sympy_note(self.config),
            *tokenizer_notes(self.tokenizer, self.config),
            self.reasons["training.mixed_precision_param"],
            self.reasons["compile.enable"],
            scale_of_microbatch(self.config),
            min(slow),
            long_window(longest.config, self.model_args.table),
        )
        return [*filter(None, lines), *self.idle_options.values()]

    @property
    def idle_options(self) -> dict[str, str]:
        """Options that have no effect in this stage or a later one, and a sentence why."""
        names, groups = list(self.model_args.table.parameters), self.config.optimizer.groups
        idle = (
            *idle_keys(self.config, self.facts, RULES),
            *idle_source_options(self.config),
            *idle_groups(groups, names, self.frozen),
        )
        lines = {line.partition(" = ")[0]: line for line in idle}
        later = lines if self.next_stage is None else self.next_stage.idle_options
        is_inherited = self.facts.is_inherited
        return {key: line for key, line in lines.items() if key in later and not is_inherited(key)}


def _choose_name(_: JobConfig, facts: JobFacts) -> Choice:
    """A model folder decides about the family, unless the config does."""
    return Choice({"model": {"name": facts.family.name}} if facts.family is not None else {})


def _choose_mesh(config: JobConfig, facts: JobFacts) -> Choice:
    if facts.world_size is None:
        return Choice()
    update = degrees.fill_in_mesh(config, facts.world_size)
    batch = update["training"]["global_batch_size"]
    follows_ranks = config.training.global_batch_size == -1 and facts.world_size > 1
    line = (
        f"training.global_batch_size = -1: the batch follows the number of ranks, here {batch} "
        f"sequences per step; set it to {batch} for the same result on any mesh"
    )
    return Choice(update, line if follows_ranks else "")


CHOICES: tuple[tuple[str, Callable[[JobConfig, JobFacts], Choice]], ...] = (
    ("model.name", _choose_name),
    ("training.global_batch_size", _choose_mesh),
    ("training.mixed_precision_param", precision.choose_type),
    ("compile.enable", compile_choice.choose_compile),
)
"""How -1, "auto" and the family are filled in, in this order; by the key that is decided."""


def _fill_in(config: JobConfig, facts: JobFacts) -> tuple[JobConfig, dict[str, str]]:
    """Return the config of a stage with nothing left open but the reduction, and the reasons for
    the log; raise `ConfigError` for each broken rule."""
    mistakes, reasons = Mistakes(), dict[str, str]()
    mistakes.errors += broken_rules(config, facts, (degrees.MESH, stages.TAKES_STAGES))
    if mistakes.errors:  # what depends on the mesh can't be judged
        facts = replace(facts, world_size=None)
    for key, choose in CHOICES:
        update, reasons[key] = choose(config, facts)
        config = changed(config, update)
    mistakes.errors += broken_rules(config, facts, RULES)
    mistakes.check()
    return config, reasons


def _complete(config: JobConfig, reasons: Mapping[str, str], facts: JobFacts) -> ResolvedJob:
    """Return the job of a stage that keeps to `RULES`; raise `ConfigError` if its gradients can't
    be kept, or it doesn't fit its device."""
    assert facts.family is not None
    assert facts.model is not None
    assert facts.tokenizer is not None
    table = facts.spec
    pipeline_modules = stages.assign_modules(config.parallelism, table, config.training.seq_len)
    fp32_modules = precision.find_fp32_modules(config, table)
    frozen = find_frozen(config, list(table.parameters))
    load = memory.heaviest_load(config, table, pipeline_modules, frozen)
    config = changed(config, memory.choose_reduction(config, load))
    least_bytes = memory.least_memory(config, load)
    check_rules(config, replace(facts, least_bytes=least_bytes), memory.RULES)
    return ResolvedJob(
        config=config,
        written=config,
        facts=facts,
        reasons=reasons,
        family=facts.family,
        model_args=facts.model,
        tokenizer=facts.tokenizer,
        frozen=frozen,
        pipeline_modules=pipeline_modules,
        fp32_modules=fp32_modules,
        float8_layers=precision.find_float8_layers(config, table, fp32_modules),
        least_bytes=least_bytes,
        own_code=facts.own_code,
    )


def resume_from(job: ResolvedJob, saved: Saved) -> ResolvedJob:
    """Return the stage of `job` that continues from a checkpoint.

    Args:
        job: of the first stage that it may continue with.

    Raises:
        ConfigError: if the checkpoint doesn't suit the job.
    """
    checkpoint, manifest = saved.place.path, saved.manifest
    job = job.stage_at(manifest["step"])
    diff = find_resume_diff(
        manifest,
        checkpoint,
        job.config,
        job.model_args,
        job.data_identity,
        job.frozen,
        job.own_code,
        begins_stage=job.begins_stage_with(manifest),
    )
    diff.check()
    trained = {n: p for n, p in job.model_args.table.parameters.items() if n not in job.frozen}
    optimizer, was = job.config.optimizer, manifest["config"].get("optimizer", {})
    check(
        diff.is_done
        or OPTIMIZER in excluded_parts(job.config.checkpoint, manifest)
        or not has_other_state(optimizer, was, trained),
        "optimizer.name",
        optimizer.name,
        f"checkpoint {checkpoint} was saved with a different optimizer",
        'use that, or start with a fresh one: checkpoint.exclude_from_loading = ["optimizer"]',
    )
    return replace(job, resume_step=manifest["step"], resume_diff=diff)


@contextmanager
def _of_stage(config: JobConfig, number: int) -> Iterator[None]:
    """Put errors that are raised inside under the keys of a stage, counted from 0."""
    try:
        yield
    except ConfigError as error:
        raise error_of_stage(error, config, number) from None


def resolve(config: JobConfig, facts: JobFacts) -> ResolvedJob:
    """Return the job of `config`: its first stage, or the one that its checkpoint continues with.

    Args:
        facts: everything known here, as `look` returns it.

    Raises:
        ConfigError: for every rule that is broken, as far as the facts tell; of several stages,
            in the first that breaks one.
    """
    mistakes, filled = Mistakes(), list[tuple[JobConfig, dict[str, str]]]()
    mistakes.errors += facts.faults
    with mistakes.collect():
        for number, stage in enumerate(staged(config)):
            with _of_stage(config, number):
                filled.append(_fill_in(stage, facts))
    mistakes.check()
    following: ResolvedJob | None = None
    for number, (stage, reasons) in reversed(list(enumerate(filled))):
        with _of_stage(config, number):
            job = _complete(stage, reasons, facts)
        following = replace(
            job,
            written=config,
            stage_number=number + 1,
            starts_after=filled[number - 1][0].training.steps if number else 0,
            next_stage=following,
        )
    assert following is not None
    return following if facts.saved is None else resume_from(following, facts.saved)


def with_choices(job: ResolvedJob, choices: Sequence[Update] = ()) -> ResolvedJob:
    """Return the job and its later stages, judged once more by its facts.

    Args:
        choices: the values that another rank has filled in, for each of these stages; as a rule,
            the job's own.
    """
    following: ResolvedJob | None = None
    for index, stage in reversed(list(enumerate(job.training_stages))):
        config = changed(stage.config, choices[index] if choices else {})
        with _of_stage(job.written, stage.stage_number - 1):
            judged = _complete(*_fill_in(config, job.facts), job.facts)
        following = replace(
            stage,
            config=judged.config,
            facts=job.facts,
            least_bytes=judged.least_bytes,
            next_stage=following,
        )
    assert following is not None
    return following
