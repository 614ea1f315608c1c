"""The parts of one rank's job, made ready for its first step."""

import dataclasses
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint import commit
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import Manifest
from meshwright.config.job_config import JobConfig, has_inductor
from meshwright.datasets.loader import Loader
from meshwright.datasets.opening import OpenSource
from meshwright.datasets.sample_stream import Cursor
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics import records as history
from meshwright.metrics.records import Sink
from meshwright.metrics.reporter import Reporter
from meshwright.metrics.sinks import Spared
from meshwright.models.kernels import large_blocks
from meshwright.parallelisms.activation_checkpoint import find_ops
from meshwright.parallelisms.meshes import Meshes, build_meshes, set_timeout, start_process_group
from meshwright.parallelisms.rules.degrees import check_device
from meshwright.parallelisms.rules.memory import check_memory
from meshwright.system import device as hardware
from meshwright.system.log import log_to_file, logger
from meshwright.system.processes import CHECKED, GPUS_EXPECTED, OTHER_MALLOC
from meshwright.train.announce import announce, note_failure, note_start
from meshwright.train.bad_steps import BadStepReporter
from meshwright.train.build import build_loader, build_reporter, initialize_weights
from meshwright.train.preflight import Plan, check_first_weights, resume_diff
from meshwright.train.resolve_model import user_sinks
from meshwright.train.resume import best_of, place_in_data
from meshwright.train.trainer import Trainer
from meshwright.train.validation import Validate, WriteTexts, build_sampling, build_validation


@dataclass(frozen=True)
class Job:
    """The parts of one rank's job, ready for the first step."""

    plan: Plan
    device: torch.device
    meshes: Meshes
    trainer: Trainer
    checkpoints: CheckpointManager
    sources: Sequence[OpenSource]
    held_out: Sequence[OpenSource]
    loader: Loader
    reporter: Reporter
    validate: Validate | None
    write_texts: WriteTexts | None
    bad_steps: BadStepReporter
    resumed_step: int
    """The last step that was taken before this process; 0 at the start."""
    since: float
    """`time.perf_counter()` when its set-up began."""
    heart: Heartbeat


def start(plan: Plan) -> torch.device:
    """Check the plan against the device, and have the ranks meet."""
    config = plan.config
    if config.training.deterministic:
        hardware.make_deterministic()
    device = hardware.pick_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get(GPUS_EXPECTED, "0"))
    )
    check_device(
        config,
        device.type,
        # pytorch pull request 180666; a TorchVersion compares as a version, not as text
        waits_for_offload=torch.__version__ >= "2.13",
        has_float8=hardware.has_float8(device),
    )
    if device.type == "cuda":
        check_memory(config, plan.least_bytes, hardware.memory_gib(device))
    find_ops(config.activation_checkpoint.saved_ops)
    start_process_group(device, config.comm.init_timeout_seconds)
    return device


def order_attention(plan: Plan, device: torch.device) -> list[str]:
    """Return the order of torch's kernels of attention on a GPU, if plain attention is used; empty:
    torch's own. The log names the kernel."""
    training, parallelism = plan.config.training, plan.config.parallelism
    has_own = training.mask_documents or parallelism.context_parallel_degree > 1
    if device.type != "cuda" or has_own:
        return []
    spec = plan.model_args.table.blocks[0].attention
    tp = parallelism.tensor_parallel_degree
    order, line = hardware.choose_attention(
        training.attention_kernel,
        device,
        training.seq_len,
        getattr(torch, training.mixed_precision_param),
        (spec.n_heads // tp, spec.n_kv_heads // tp, spec.head_dim),
    )
    logger.info("%s", line)
    return order


def set_up(
    plan: Plan,
    device: torch.device,
    checkpoints: CheckpointManager,
    sources: Sequence[OpenSource],
    held_out: Sequence[OpenSource],
    extra_sinks: Sequence[Sink],
    heart: Heartbeat,
) -> Job | None:
    """Resume or begin: build every part of the job. None if its last step is done already."""
    since = time.perf_counter()
    config = plan.config
    plan, found = _resume_or_begin(plan, checkpoints)
    if found is not None and resume_diff(plan, found).is_done:
        if plan.resume_step < config.training.steps:
            place_in_data(plan, found, sources)  # raises if it is other data, which may go on
        _say_done(plan)
        return None
    log_to_file(Path(config.job.dump_folder) / "logs", dist.get_rank())
    if plan.resume_step == 0 and dist.get_rank() == 0:
        history.set_aside(Path(config.job.dump_folder))
    announce(plan, device)
    note_start(plan, device)
    if found is not None and dist.get_rank() == 0:
        resume_diff(plan, found).log(_is_printed(plan))
    with note_failure(plan, lambda: plan.resume_step):
        parts = plan, device, checkpoints, found, sources, held_out, extra_sinks, heart
        return _build(*parts, since=since)


def _build(
    plan: Plan,
    device: torch.device,
    checkpoints: CheckpointManager,
    found: Manifest | None,
    sources: Sequence[OpenSource],
    held_out: Sequence[OpenSource],
    extra_sinks: Sequence[Sink],
    heart: Heartbeat,
    *,
    since: float,
) -> Job:
    """Build the parts of a job that resumes from `found`, or begins."""
    config = plan.config
    extra_sinks = [*extra_sinks, *_user_sinks(config)]
    torch.manual_seed(config.training.seed)
    gc.disable()  # a collection on one rank makes all others wait: they collect together

    if device.type == "cpu" and has_inductor(config):
        _take_large_blocks()
    meshes = build_meshes(plan.dims, device.type)
    set_timeout(meshes, config.comm.init_timeout_seconds)
    trainer = Trainer(plan, meshes, device, note=lambda phase: heart.beat(phase.replace("_", "/")))
    checkpoints.guard(trainer.optimizer)
    cursor = _set_values(plan, trainer, checkpoints, found, sources)
    return Job(
        plan,
        device,
        meshes,
        trainer,
        checkpoints,
        sources,
        held_out,
        loader=build_loader(plan, sources, meshes, device, cursor),
        reporter=build_reporter(
            plan,
            device,
            trainer.phases,
            extra_sinks,
            plan.resume_step,
            found["tokens_seen"] if found else 0,
            best_of(found, plan, held_out) if found else None,
        ),
        validate=build_validation(plan, held_out, meshes, device) if held_out else None,
        write_texts=(
            build_sampling(plan, meshes) if held_out and config.validation.sample_prompts else None
        ),
        bad_steps=_build_bad_steps(plan, device, sources, cursor, found),
        resumed_step=plan.resume_step,
        since=since,
        heart=heart,
    )


def _take_large_blocks() -> None:
    """Keep large tensors out of malloc's heap, unless the user has chosen an allocator."""
    chosen = next((name for name in OTHER_MALLOC if os.environ.get(name)), "")
    reason = f"{chosen} is set" if chosen else large_blocks.take()
    where = f"malloc's, since {reason}" if reason else "heaps of their own"
    logger.info("memory of large tensors: %s", where)


def _say_done(plan: Plan) -> None:
    step, steps = plan.resume_step, plan.config.training.steps
    key, what = "training.steps", f"step {step} of {steps}"
    if step < steps:
        key, what = "training.max_epochs", f"step {step}, where the data ends"
    words = "nothing to do: %s holds %s. To train further, raise %s; to start over, use another "
    logger.info(words + "job.dump_folder.", plan.checkpoint_folder, what, key)


def _resume_or_begin(plan: Plan, checkpoints: CheckpointManager) -> tuple[Plan, Manifest | None]:
    """Return the plan with the step it resumes from, and the manifest of that checkpoint, if any.

    Raises:
        ConfigError: if the checkpoint does not suit the config, or the first weights do not.
    """
    found = checkpoints.select_and_verify()
    plan = dataclasses.replace(plan, resume_step=found["step"] if found else 0)
    if found is not None:
        resume_diff(plan, found).check()
    else:
        checkpoints.tell(lambda: check_first_weights(plan))
    return plan, found


def _build_bad_steps(
    plan: Plan,
    device: torch.device,
    sources: Sequence[OpenSource],
    cursor: Cursor,
    found: Manifest | None,
) -> BadStepReporter:
    return BadStepReporter(
        plan.config.bad_steps,
        device,
        is_early=plan.config.optimizer.early_step_in_backward,
        folder=Path(plan.config.job.dump_folder),
        sources=[source.entry.name for source in sources],
        step=plan.resume_step,
        cursor=cursor,
        saved=found["bad_steps"] if found else None,  # checkpoints from before have none
    )


def _user_sinks(config: JobConfig) -> list[Sink]:
    """Sinks of the user's own module, for the first rank; an `OSError` of theirs is a warning."""
    if dist.get_rank() > 0:
        return []
    folder = Path(config.job.dump_folder)
    return [
        Spared(name, partial(build, config, folder)) for name, build in user_sinks(config).items()
    ]


def _set_values(
    plan: Plan,
    trainer: Trainer,
    checkpoints: CheckpointManager,
    found: Manifest | None,
    sources: Sequence[OpenSource],
) -> Cursor:
    """Load the checkpoint `found`, or set the first values; return where its data begins."""
    if found is None:
        initialize_weights(plan, trainer.model)
        return Cursor()
    cursor = place_in_data(plan, found, sources)
    checkpoints.load(trainer.tensors, found)
    for stage in trainer.model.stages:
        stage.init_buffers()
    return cursor


def _is_printed(plan: Plan) -> bool:
    """Return whether `meshwright check`, which verifies no content, saw the same checkpoint."""
    load_step = plan.config.checkpoint.load_step
    return CHECKED in os.environ and plan.resume_step == commit.choose_step(
        plan.checkpoint_folder, load_step
    )
