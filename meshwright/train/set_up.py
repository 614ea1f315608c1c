"""The parts of one rank's job, made ready for its first step.

The order matters:

1. `init_ranks`: start the process group, compare the ranks' jobs, lease the checkpoint folder.
2. `_resume_or_begin`: choose and verify the checkpoint; every later message names its step.
3. `_open_data`: of the stage that the checkpoint decides, for data of earlier ones may be gone.
4. Start the log file and the history, now that the job will train.
5. Seed, stop garbage collection, build the meshes, then the model and its optimizer; load the
   checkpoint or the initial weights; then the loader can start at its place.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.store import Saved
from meshwright.datasets.opening import TABLES, find_data, open_data
from meshwright.datasets.stream import Cursor, OpenSource, steps_of_data
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.reporter import Reporter, SinkWriter
from meshwright.metrics.sinks import Sink, set_aside_run
from meshwright.parallelisms.activation_checkpoint import find_ops
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes, build_meshes, set_timeout, start_process_group
from meshwright.system import hardware
from meshwright.system.log import log_to_file, logger
from meshwright.system.processes import Launch
from meshwright.train.agreement import check_agreement, check_same, take_choices
from meshwright.train.announce import announce, note_failure
from meshwright.train.best_validation import BestValidation, best_of
from meshwright.train.build import build_loader, build_trainer, initialize_weights, work_of
from meshwright.train.build_observers import (
    build_bad_steps,
    build_observers,
    build_sinks,
    load_observers,
)
from meshwright.train.resolve import ResolvedJob, resume_from, with_choices
from meshwright.train.resume import place_in_data
from meshwright.train.running_job import RunningJob
from meshwright.train.start_facts import note_start
from meshwright.train.step_record import StepRecord
from meshwright.train.trainer import Trainer
from meshwright.train.validation import Validation


@dataclass(frozen=True)
class Data:
    """The opened data of a job."""

    sources: Sequence[OpenSource]
    validation_sources: Sequence[OpenSource]
    begin: Cursor = field(default_factory=Cursor)
    """Where the first step of a new job starts to read."""


def init_ranks(
    job: ResolvedJob, launch: Launch
) -> tuple[ResolvedJob, torch.device, CheckpointManager]:
    """Have the ranks meet, agree on the job, and lease the folder of checkpoints. Collective.

    Returns:
        The job with the first rank's choices, this rank's device, and the checkpoints.

    Raises:
        ConfigError: on every rank, if ranks run different jobs, or another job has the folder; on
            this rank alone, before they meet, if its device can't train the job.
    """
    config = job.config
    if config.training.deterministic:
        hardware.make_deterministic()
    device = hardware.pick_device(int(os.environ.get("LOCAL_RANK", "0")), launch.num_gpus)
    facts = replace(
        job.facts,
        device_type=device.type,
        device_memory_gib=hardware.memory_gib(device) if device.type == "cuda" else None,
        has_float8=hardware.has_float8(device),
    )
    job = with_choices(replace(job, facts=facts))
    find_ops(config.activation_checkpoint.saved_ops)
    if not dist.is_initialized():  # it is for a later stage
        start_process_group(device, config.comm.init_timeout_seconds)
    check_agreement(job)
    checkpoints = CheckpointManager(job.checkpoint_folder, config.checkpoint)
    job = take_choices(job, checkpoints.ranks)
    if checkpoints.ranks.on_first(lambda: job.needs_folder):
        checkpoints.take_lease()
    return job, device, checkpoints


def set_up(
    resolved: ResolvedJob,
    device: torch.device,
    checkpoints: CheckpointManager,
    heartbeat: Heartbeat,
    launch: Launch,
    extra_sinks: Sequence[Sink],
    meshes: Meshes | None = None,
    data: Data | None = None,
    clock: Callable[[], float] | None = None,
    make_sinks: Callable[[ResolvedJob, LocalModel, Sequence[Sink]], SinkWriter] = build_sinks,
    logs_to_file: bool = True,
) -> RunningJob | None:
    """Resume or start: build every part of the job. None if its last step is done already.

    Args:
        resolved: of the first stage that it may continue with.
        extra_sinks: in addition to the config's.
        meshes: of the stage before, if any: NCCL would keep memory for groups made anew.
        data: in the place of the config's.
        clock: gives the seconds that rates are made of; None: the process's.
        make_sinks: makes the writer of records.
        logs_to_file: the log goes to a file of the dump folder as well.
    """
    since = time.perf_counter()
    with checkpoints.open() as saved:
        resolved = _resume_or_begin(resolved, checkpoints, saved)
        heartbeat.update("opening the data")
        data = data or Data(*_open_data(resolved, checkpoints))
        sources, validation_sources = data.sources, data.validation_sources
        heartbeat.update("set-up")
        resolved, cursor = _place(resolved, saved, data)
        if (difference := resolved.resume_diff) is not None and difference.is_done:
            _say_done(resolved)
            return None
        if logs_to_file:
            log_to_file(Path(resolved.config.job.dump_folder) / "logs", dist.get_rank())
        is_new = meshes is not None
        attention = _begin_in_folder(resolved, device, launch, data, is_new_stage=is_new)
        with note_failure(resolved, lambda: resolved.resume_step):
            torch.manual_seed(resolved.config.training.seed)
            gc.disable()  # a collection on one rank makes all others wait: they collect together
            meshes = meshes or build_meshes(resolved.dims, device.type)
            set_timeout(meshes, resolved.config.comm.init_timeout_seconds)
            trainer = build_trainer(resolved, meshes, device, note=heartbeat.update)
            checkpoints.guard(trainer.optimizer)
            _set_values(resolved, checkpoints, trainer, saved)
            bad_steps = build_bad_steps(resolved, device, sources, cursor.counts)
            best = BestValidation(resolved.config.checkpoint)
            tokens = saved.manifest["tokens_seen"] if saved else 0
            sinks = make_sinks(resolved, trainer.model, extra_sinks)
            record = StepRecord(resolved, trainer)
            observers = build_observers(resolved, meshes, trainer, bad_steps, best, record, sinks)
            if saved is not None:
                best_before = best_of(saved.manifest, resolved, validation_sources)
                # a loss that was measured on other data doesn't compare with this job's
                load_observers(observers, {**saved.manifest, "best_validation": best_before})
            return RunningJob(
                resolved=resolved,
                device=device,
                attention=attention,
                sources=sources,
                validation_sources=validation_sources,
                begin=cursor,
                checkpoints=checkpoints,
                heartbeat=heartbeat,
                meshes=meshes,
                trainer=trainer,
                loader=build_loader(resolved, sources, meshes, device, cursor),
                reporter=Reporter(work_of(resolved, device), device, trainer.phases, tokens, clock),
                validate=Validation(resolved, validation_sources, meshes, device)
                if validation_sources
                else None,
                detector=bad_steps.detector,
                best_validation=best,
                step_record=record,
                observers=observers,
                since=since,
            )


def _place(resolved: ResolvedJob, saved: Saved | None, data: Data) -> tuple[ResolvedJob, Cursor]:
    """Return the job with the steps that its data have, and where it starts in them."""
    cursor = data.begin
    if saved is not None and resolved.resume_step < resolved.config.training.steps:
        cursor = place_in_data(resolved, saved.manifest, data.sources)
    steps = steps_of_data(resolved.config, data.sources, resolved.resume_step, cursor)
    return replace(resolved, data_steps=steps), cursor


def _begin_in_folder(
    resolved: ResolvedJob, device: torch.device, launch: Launch, data: Data, *, is_new_stage: bool
) -> list[str]:
    """Say in the log and in the dump folder what this start of the job does; return the order of
    kernels of attention. Collective."""
    dump_folder = Path(resolved.config.job.dump_folder)
    if resolved.resume_step == 0 and dist.get_rank() == 0:
        set_aside_run(dump_folder)
    announce(resolved, device, launch, data.sources, data.validation_sources)
    attention = _order_attention(resolved, device)
    note_start(resolved, device, data.sources, data.validation_sources, attention, is_new_stage)
    if resolved.resume_diff is not None and dist.get_rank() == 0:
        # `check`, which verifies no content, may have chosen a different checkpoint
        resolved.resume_diff.log(launch.checked_step == resolved.resume_step)
    return attention


def _resume_or_begin(
    resolved: ResolvedJob, checkpoints: CheckpointManager, saved: Saved | None
) -> ResolvedJob:
    """Return the job of the stage and step that this run resumes from.

    Raises:
        ConfigError: if the checkpoint doesn't suit the config, or the initial weights don't.
    """
    if saved is not None:
        return resume_from(resolved, saved)
    config, is_tie_given = resolved.config.checkpoint, resolved.config.model.gives_tie
    checkpoints.ranks.on_first(
        lambda: check_initial(
            config, resolved.model_args, resolved.family, is_tie_given=is_tie_given
        )
    )
    return resolved


def _open_data(
    resolved: ResolvedJob, checkpoints: CheckpointManager
) -> tuple[Sequence[OpenSource], Sequence[OpenSource]]:
    """Open the training and the validation data by what the first rank finds of it: files, commits
    and caches. The first rank of each node compares the content of the files. Collective."""
    facts = checkpoints.ranks.on_first(lambda: find_data(resolved.config))
    looks_at_files = os.environ.get("LOCAL_RANK", "0") == "0"
    opened = [
        open_data(table, resolved.config, facts, looks_at_files=looks_at_files) for table in TABLES
    ]
    check_same(
        {f"{source.entry.key}.dataset": source.content for source in itertools.chain(*opened)}
    )
    return opened[0], opened[1]


def _order_attention(resolved: ResolvedJob, device: torch.device) -> list[str]:
    """Return the order of torch's kernels of attention on a GPU, if plain attention is used; empty:
    torch's own. The log gives the kernel."""
    training, parallelism = resolved.config.training, resolved.config.parallelism
    has_own = training.mask_documents or parallelism.context_parallel_degree > 1
    if device.type != "cuda" or has_own:
        return []
    spec = resolved.model_args.table.plain_attention
    if spec is None:
        return []
    tp = parallelism.tensor_parallel_degree
    chosen = hardware.choose_attention(
        training.attention_kernel,
        device,
        training.seq_len,
        getattr(torch, training.mixed_precision_param),
        (spec.n_heads // tp, spec.n_kv_heads // tp, spec.head_dim),
    )
    logger.info("%s", chosen.line)
    return chosen.order


def _say_done(resolved: ResolvedJob) -> None:
    step, steps = resolved.resume_step, resolved.config.training.steps
    key, what = "training.steps", f"step {step} of {steps}"
    if step < steps:
        key, what = "training.max_epochs", f"step {step}, where the data ends"
    words = "nothing to do: %s holds %s. To train further, raise %s; to start over, use another "
    words += "job.dump_folder."
    if -1 < resolved.config.checkpoint.rewind_to < step:
        words += " checkpoint.rewind_to went back already; to go back again, name another step."
    logger.info(words, resolved.checkpoint_folder, what, key)


def _set_values(
    resolved: ResolvedJob, checkpoints: CheckpointManager, trainer: Trainer, saved: Saved | None
) -> None:
    """Load the checkpoint `saved`, or set the first values."""
    if saved is None:
        initialize_weights(resolved, trainer.model, checkpoints.ranks)
        if trainer.average is not None:
            trainer.average.begin()
        return
    checkpoints.load(trainer.tensors, saved)
    for stage in trainer.model.stages:
        stage.init_buffers()
