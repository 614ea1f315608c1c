"""The parts of one rank's job, made ready for its first step.

The order matters:

1. `meet`: start the process group, open the data, compare the jobs of all ranks, claim the
   checkpoints' folder.
2. `_resume_or_begin`: choose and verify the checkpoint; every later message names its step.
3. `set_up`: begin the log file and the history, now that the job will train.
4. `_build`: seed, stop garbage collection, build the meshes; then the model and its optimizer.
5. `_set_values`: load the checkpoint or the first weights; then the loader can begin at its place.
"""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint import find
from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import Manifest
from meshwright.config.job_config import JobConfig
from meshwright.datasets.loader import Loader
from meshwright.datasets.opening import (
    Found,
    OpenSource,
    open_told,
    open_training_data,
    open_validation_data,
)
from meshwright.datasets.stream import Cursor, steps_of_data
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics import history
from meshwright.metrics.reporter import Pause, Phase, Reporter
from meshwright.metrics.sinks import LoadsFile, Sink, Spared
from meshwright.parallelisms.activation_checkpoint import find_ops
from meshwright.parallelisms.meshes import Meshes, build_meshes, set_timeout, start_process_group
from meshwright.parallelisms.rules.degrees import check_device
from meshwright.parallelisms.rules.memory import check_memory
from meshwright.system import hardware
from meshwright.system.log import busy, log_to_file, logger
from meshwright.system.processes import Launch
from meshwright.train.agreement import check_agreement
from meshwright.train.announce import announce, note_failure, note_start
from meshwright.train.bad_steps import BadStepReporter
from meshwright.train.build import build_loader, build_reporter, initialize_weights
from meshwright.train.preflight import Plan, resume_diff
from meshwright.train.resolve_model import user_sinks
from meshwright.train.resume import best_of, place_in_data
from meshwright.train.trainer import Trainer
from meshwright.train.validation import Validation, WriteTexts, build_sampling

PAUSES: dict[str, Pause | None] = {
    "validation": "validation",
    "save": "checkpoint",
    "preparing saves": None,
}
"""Phases that rates leave out, and the figure that the time of each adds to, if any."""


@dataclass(frozen=True)
class Met:
    """A job whose ranks have met: they agree on it, its data is open, its folder claimed."""

    plan: Plan
    """Of the stage that the job probably continues with; in `Job`, surely."""
    whole: Plan
    """Of the first stage that it may continue with: the newest checkpoint may be damaged."""
    device: torch.device
    attention: Sequence[str]
    """torch's kernels of attention in the order in which they are to be tried; empty: its own."""
    sources: Sequence[OpenSource]
    held_out: Sequence[OpenSource]
    checkpoints: CheckpointManager
    heart: Heartbeat
    launch: Launch


@dataclass(frozen=True)
class Job(Met):
    """The parts of one rank's job, ready for the step after `plan.resume_step`."""

    meshes: Meshes
    trainer: Trainer
    loader: Loader
    reporter: Reporter
    validate: Validation | None
    write_texts: WriteTexts | None
    bad_steps: BadStepReporter
    since: float
    """`time.perf_counter()` when its set-up began."""

    @contextmanager
    def phase(self, name: str, step: int | None = None, *, is_long: bool = False) -> Iterator[None]:
        """Tell the launcher, the log and the clock which part of the job this rank does inside.

        Args:
            step: the one under way; None: as before.
            is_long: the log says every ten seconds that the phase is not over, as it does of a
                phase in `PAUSES`.
        """
        self.heart.beat(name, step)
        with ExitStack() as stack:
            if name in PAUSES:
                stack.enter_context(self.reporter.paused(PAUSES[name]))
            if is_long or name in PAUSES:
                stack.enter_context(busy(name))
            yield


def meet(plan: Plan, heart: Heartbeat, launch: Launch) -> Met:
    """Have the ranks meet, open the data and claim the folder of checkpoints. Collective.

    Raises:
        ConfigError: on every rank, if ranks run different jobs, or another job has the folder.
    """
    whole, device = plan, _start(plan, launch.num_gpus)
    checkpoints = CheckpointManager(plan.checkpoint_folder, plan.config.checkpoint)
    if plan.next is not None:  # data of a stage that is over may be gone
        plan = plan.at(checkpoints.tell(lambda: _likely_step(plan)))
    attention = _order_attention(plan, device)
    sources, held_out = _open_data(plan, checkpoints)
    plan = replace(plan, data_steps=steps_of_data(plan.config, sources))
    checkpoints.claim()
    return Met(plan, whole, device, attention, sources, held_out, checkpoints, heart, launch)


def _likely_step(plan: Plan) -> int:
    """Return the step that the job probably resumes from: the content is not verified yet."""
    return find.choose_step(plan.checkpoint_folder, plan.config.checkpoint.load_step) or 0


def _open_data(
    plan: Plan, checkpoints: CheckpointManager
) -> tuple[Sequence[OpenSource], Sequence[OpenSource]]:
    """Open the training and the validation data, and compare the ranks' jobs. Collective.

    The first rank looks for files, revisions and caches, and tells the others.
    """
    opened: list[Sequence[OpenSource]] = []

    def find() -> list[Found]:
        opened.extend([open_training_data(plan.config), open_validation_data(plan.config)])
        return [source.found for sources in opened for source in sources]

    told = checkpoints.tell(find)
    if not opened:
        is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        opened.extend(open_told(told, plan.config, is_first_here=is_first_here))
    sources, held_out = opened
    check_agreement(plan, [*sources, *held_out])
    return sources, held_out


def _start(plan: Plan, num_gpus: int) -> torch.device:
    """Check the plan against the device, and have the ranks meet.

    Args:
        num_gpus: that the driver lists; 0: not known.
    """
    config = plan.config
    if config.training.deterministic:
        hardware.make_deterministic()
    device = hardware.pick_device(int(os.environ.get("LOCAL_RANK", "0")), num_gpus)
    check_device(
        config,
        device.type,
        # pytorch pull request 180666; a TorchVersion compares as a version, not as text
        waits_for_offload=torch.__version__ >= "2.13",
        has_float8=hardware.has_float8(device),
    )
    if device.type == "cuda":
        for stage in plan.stages:
            check_memory(stage.config, stage.least_bytes, hardware.memory_gib(device))
    find_ops(config.activation_checkpoint.saved_ops)
    if not dist.is_initialized():  # it is for a later stage
        start_process_group(device, config.comm.init_timeout_seconds)
    return device


def _order_attention(plan: Plan, device: torch.device) -> list[str]:
    """Return the order of torch's kernels of attention on a GPU, if plain attention is used; empty:
    torch's own. The log names the kernel."""
    training, parallelism = plan.config.training, plan.config.parallelism
    has_own = training.mask_documents or parallelism.context_parallel_degree > 1
    if device.type != "cuda" or has_own:
        return []
    spec = plan.model_args.table.layers[0].attention
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


def set_up(met: Met, extra_sinks: Sequence[Sink], meshes: Meshes | None = None) -> Job | None:
    """Resume or begin: build every part of the job. None if its last step is done already.

    Args:
        extra_sinks: in addition to the config's.
        meshes: of the stage before: NCCL would keep memory for groups made anew. None: they are
            made.
    """
    since = time.perf_counter()
    met, found = _resume_or_begin(met)
    plan, dump_folder = met.plan, Path(met.plan.config.job.dump_folder)
    if found is not None and resume_diff(plan, found).is_done:
        if plan.resume_step < plan.config.training.steps:
            place_in_data(plan, found, met.sources)  # raises if it is other data, which may go on
        _say_done(plan)
        return None
    log_to_file(dump_folder / "logs", dist.get_rank())
    if plan.resume_step == 0 and dist.get_rank() == 0:
        history.set_aside(dump_folder)
    announce(plan, met.device, met.launch, met.sources, met.held_out)
    note_start(plan, met.device, is_new_stage=meshes is not None)
    if found is not None and dist.get_rank() == 0:
        resume_diff(plan, found).log(met.launch.is_checked and _is_newest(plan))
    with note_failure(plan, lambda: plan.resume_step):
        meshes = meshes or build_meshes(plan.dims, met.device.type)
        return _build(met, found, extra_sinks, meshes, since)


def _build(
    met: Met, found: Manifest | None, extra_sinks: Sequence[Sink], meshes: Meshes, since: float
) -> Job:
    """Build the parts of a job that resumes from `found`, or begins."""
    plan, config, device = met.plan, met.plan.config, met.device
    extra_sinks = [*extra_sinks, *_user_sinks(config)]
    torch.manual_seed(config.training.seed)
    gc.disable()  # a collection on one rank makes all others wait: they collect together
    set_timeout(meshes, config.comm.init_timeout_seconds)

    def note(phase: Phase) -> None:
        met.heart.beat(phase.replace("_", "/"))

    trainer = Trainer(plan, meshes, device, note=note)
    if plan.model_args.table.mixtures and dist.get_rank() == 0:
        file = Path(config.job.dump_folder) / "experts.json"
        loads = partial(LoadsFile, file, lambda: trainer.model.balance.loads)
        extra_sinks.append(Spared("experts.json", loads))
    met.checkpoints.guard(trainer.optimizer)
    cursor = _set_values(met, trainer, found)
    tokens_seen = found["tokens_seen"] if found else 0
    best = best_of(found, plan, met.held_out) if found else None
    writes_texts = met.held_out and config.validation.sample_prompts
    return Job(
        **vars(met),
        meshes=meshes,
        trainer=trainer,
        loader=build_loader(plan, met.sources, meshes, device, cursor),
        reporter=build_reporter(plan, device, trainer.phases, extra_sinks, tokens_seen, best),
        validate=Validation(plan, met.held_out, meshes, device) if met.held_out else None,
        write_texts=build_sampling(plan, meshes) if writes_texts else None,
        bad_steps=BadStepReporter(
            config.bad_steps,
            device,
            is_early=config.optimizer.early_step_in_backward,
            folder=Path(config.job.dump_folder),
            sources=[source.entry.name for source in met.sources],
            step=plan.resume_step,
            cursor=cursor,
            saved=found["bad_steps"] if found else None,
        ),
        since=since,
    )


def _say_done(plan: Plan) -> None:
    step, steps = plan.resume_step, plan.config.training.steps
    key, what = "training.steps", f"step {step} of {steps}"
    if step < steps:
        key, what = "training.max_epochs", f"step {step}, where the data ends"
    words = "nothing to do: %s holds %s. To train further, raise %s; to start over, use another "
    logger.info(words + "job.dump_folder.", plan.checkpoint_folder, what, key)


def _resume_or_begin(met: Met) -> tuple[Met, Manifest | None]:
    """Return the job with the step it resumes from, and the manifest of that checkpoint, if any.

    Raises:
        ConfigError: if the checkpoint does not suit the config, or the first weights do not.
    """
    found = met.checkpoints.select_and_verify()
    step = found["step"] if found else 0
    plan = met.plan
    if (right := met.whole.at(step)).stage != plan.stage:  # a damaged checkpoint was passed over
        plan = right
        sources, held_out = _open_data(plan, met.checkpoints)
        attention = _order_attention(plan, met.device)
        met = replace(met, attention=attention, sources=sources, held_out=held_out)
    plan = replace(plan, resume_step=step)
    if found is not None:
        resume_diff(plan, found).check()
    else:
        met.checkpoints.tell(
            lambda: check_initial(plan.config.checkpoint, plan.model_args, plan.family)
        )
    return replace(met, plan=plan), found


def _user_sinks(config: JobConfig) -> list[Sink]:
    """Sinks of the user's own module, for the first rank; an `OSError` of theirs is a warning."""
    if dist.get_rank() > 0:
        return []
    folder = Path(config.job.dump_folder)
    return [
        Spared(name, partial(build, config, folder)) for name, build in user_sinks(config).items()
    ]


def _set_values(met: Met, trainer: Trainer, found: Manifest | None) -> Cursor:
    """Load the checkpoint `found`, or set the first values; return where its data begins."""
    if found is None:
        initialize_weights(met.plan, trainer.model)
        if trainer.average is not None:
            trainer.average.begin()
        return Cursor()
    cursor = place_in_data(met.plan, found, met.sources)
    met.checkpoints.load(trainer.tensors, found)
    for stage in trainer.model.stages:
        stage.init_buffers()
    return cursor


def _is_newest(plan: Plan) -> bool:
    """Return whether `meshwright check`, which verifies no content, saw the same checkpoint."""
    load_step = plan.config.checkpoint.load_step
    return plan.resume_step == find.choose_step(plan.checkpoint_folder, load_step)
