"""The parts of one rank's job, made ready for its first step.

The order matters:

1. `init_ranks`: start the process group, compare the ranks' jobs, claim the checkpoint folder.
2. `_resume_or_begin`: choose and verify the checkpoint; every later message names its step.
3. `_open_data`: of the stage that the checkpoint decides, for data of earlier ones may be gone.
4. Begin the log file and the history, now that the job will train.
5. Seed, stop garbage collection, build the meshes, then the model and its optimizer; load the
   checkpoint or the first weights; then the loader can begin at its place.
"""

import functools
import gc
import hashlib
import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright
from meshwright.checkpoint import commit, find
from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import Manifest
from meshwright.config.changes import differences, shown, to_json
from meshwright.datasets.identity import short_hash, tokenizer_parts
from meshwright.datasets.loader import Loader
from meshwright.datasets.opening import TABLES, find_data, open_data
from meshwright.datasets.stream import Cursor, OpenSource, steps_of_data
from meshwright.launch.heartbeat import Heartbeat
from meshwright.metrics.reporter import Pause, Reporter
from meshwright.metrics.sinks import Sink, set_aside_run
from meshwright.parallelisms.activation_checkpoint import find_ops
from meshwright.parallelisms.meshes import Meshes, build_meshes, set_timeout, start_process_group
from meshwright.system import hardware
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.system.log import busy, log_to_file, logger
from meshwright.system.processes import Launch
from meshwright.train.announce import announce, note_failure, note_start
from meshwright.train.bad_steps import BadStepReporter
from meshwright.train.build import build_loader, build_reporter, initialize_weights
from meshwright.train.facts import Saved
from meshwright.train.resolve import ResolvedJob, resolve, resume_from
from meshwright.train.resume import library_versions, place_in_data
from meshwright.train.trainer import Trainer, build_trainer
from meshwright.train.validation import Validation

PAUSES: dict[str, Pause | None] = {
    "validation": "validation",
    "save": "checkpoint",
    "preparing saves": None,
}
"""Phases that rates leave out, and the figure that the time of each adds to, if any."""


@dataclass(frozen=True)
class Job:
    """The parts of one rank's job, ready for the step after `plan.resume_step`."""

    plan: ResolvedJob
    device: torch.device
    attention: Sequence[str]
    """torch's kernels of attention in the order in which they are to be tried; empty: its own."""
    sources: Sequence[OpenSource]
    validation_sources: Sequence[OpenSource]
    checkpoints: CheckpointManager
    heartbeat: Heartbeat
    meshes: Meshes
    trainer: Trainer
    loader: Loader
    reporter: Reporter
    validate: Validation | None
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
        self.heartbeat.update(name, step)
        with ExitStack() as stack:
            if name in PAUSES:
                stack.enter_context(self.reporter.paused(PAUSES[name]))
            if is_long or name in PAUSES:
                stack.enter_context(busy(name))
            yield


def init_ranks(plan: ResolvedJob, launch: Launch) -> tuple[torch.device, CheckpointManager]:
    """Have the ranks meet, and claim the folder of checkpoints. Collective.

    Raises:
        ConfigError: on every rank, if ranks run different jobs, or another job has the folder.
    """
    config = plan.config
    if config.training.deterministic:
        hardware.make_deterministic()
    device = hardware.pick_device(int(os.environ.get("LOCAL_RANK", "0")), launch.num_gpus)
    facts = replace(
        plan.facts,
        device_type=device.type,
        device_memory_gib=hardware.memory_gib(device) if device.type == "cuda" else None,
        has_float8=hardware.has_float8(device),
    )
    resolve(plan.written, facts)  # once more, now that the device is known
    find_ops(config.activation_checkpoint.saved_ops)
    if not dist.is_initialized():  # it is for a later stage
        start_process_group(device, config.comm.init_timeout_seconds)
    check_agreement(plan)
    checkpoints = CheckpointManager(plan.checkpoint_folder, config.checkpoint)
    if checkpoints.tell(lambda: plan.needs_folder):
        checkpoints.claim()
    return device, checkpoints


def set_up(
    plan: ResolvedJob,
    device: torch.device,
    checkpoints: CheckpointManager,
    heartbeat: Heartbeat,
    launch: Launch,
    extra_sinks: Sequence[Sink],
    meshes: Meshes | None = None,
) -> Job | None:
    """Resume or begin: build every part of the job. None if its last step is done already.

    Args:
        plan: of the first stage that it may continue with.
        extra_sinks: in addition to the config's.
        meshes: of the stage before, if any: NCCL would keep memory for groups made anew.
    """
    since = time.perf_counter()
    plan, found = _resume_or_begin(plan, checkpoints)
    heartbeat.update("opening the data")
    sources, validation_sources = _open_data(plan, checkpoints)
    heartbeat.update("set-up")
    has_steps, cursor = plan.resume_step < plan.config.training.steps, Cursor()
    if found is not None and has_steps:
        cursor = place_in_data(plan, found, sources)
    data_steps = steps_of_data(plan.config, sources, plan.resume_step, cursor)
    plan = replace(plan, data_steps=data_steps)
    difference = plan.resume_diff
    if difference is not None and difference.is_done:
        _say_done(plan)
        return None
    dump_folder = Path(plan.config.job.dump_folder)
    log_to_file(dump_folder / "logs", dist.get_rank())
    if plan.resume_step == 0 and dist.get_rank() == 0:
        set_aside_run(dump_folder)
    announce(plan, device, launch, sources, validation_sources)
    note_start(plan, device, is_new_stage=meshes is not None)
    if difference is not None and dist.get_rank() == 0:
        # `check`, which verifies no content, may have seen another checkpoint
        seen = find.choose(plan.checkpoint_folder, plan.config.checkpoint.load_step)
        is_same = seen is not None and seen.manifest["step"] == plan.resume_step
        difference.log(launch.is_checked and is_same)
    with note_failure(plan, lambda: plan.resume_step):
        torch.manual_seed(plan.config.training.seed)
        gc.disable()  # a collection on one rank makes all others wait: they collect together
        meshes = meshes or build_meshes(plan.dims, device.type)
        set_timeout(meshes, plan.config.comm.init_timeout_seconds)
        trainer = build_trainer(
            plan, meshes, device, note=lambda phase: heartbeat.update(phase.replace("_", "/"))
        )
        checkpoints.guard(trainer.optimizer)
        _set_values(plan, checkpoints, trainer, found)
        return Job(
            plan=plan,
            device=device,
            attention=_order_attention(plan, device),
            sources=sources,
            validation_sources=validation_sources,
            checkpoints=checkpoints,
            heartbeat=heartbeat,
            meshes=meshes,
            trainer=trainer,
            loader=build_loader(plan, sources, meshes, device, cursor),
            reporter=build_reporter(
                plan, device, trainer.phases, trainer.model, found, validation_sources, extra_sinks
            ),
            validate=Validation(plan, validation_sources, meshes, device)
            if validation_sources
            else None,
            bad_steps=BadStepReporter(
                plan.config,
                device,
                sources=[source.entry.name for source in sources],
                step=plan.resume_step,
                cursor=cursor,
                saved=found["bad_steps"] if found else None,
            ),
            since=since,
        )


def _resume_or_begin(
    plan: ResolvedJob, checkpoints: CheckpointManager
) -> tuple[ResolvedJob, Manifest | None]:
    """Return the plan of the stage and step that the job resumes from, and the manifest there.

    Raises:
        ConfigError: if the checkpoint does not suit the config, or the first weights do not.
    """
    found = checkpoints.select_and_verify()
    if found is None:
        config, is_tie_given = plan.config.checkpoint, plan.config.model.gives_tie
        checkpoints.tell(
            lambda: check_initial(config, plan.model_args, plan.family, is_tie_given=is_tie_given)
        )
        return plan, None
    folder = commit.step_folder(plan.checkpoint_folder, found["step"])
    return resume_from(plan, Saved(folder, found)), found


def _open_data(
    plan: ResolvedJob, checkpoints: CheckpointManager
) -> tuple[Sequence[OpenSource], Sequence[OpenSource]]:
    """Open the training and the validation data by what the first rank finds of it: files, commits
    and caches. The first rank of each node compares the content of the files. Collective."""
    facts = checkpoints.tell(lambda: find_data(plan.config))
    looks_at_files = os.environ.get("LOCAL_RANK", "0") == "0"
    opened = [
        open_data(table, plan.config, facts, looks_at_files=looks_at_files) for table in TABLES
    ]
    check_same(
        {f"{source.entry.key}.dataset": source.content for source in itertools.chain(*opened)}
    )
    return opened[0], opened[1]


CONFIG = "config"

HINTS = {
    "compile.enable": ' ("auto" asks each machine for a C++ compiler; false runs on all machines)',
    "training.mixed_precision_param": ' ("auto" asks the CPU of each machine; "float32" runs on '
    "all machines)",
}
"""Said of keys whose "auto" machines may decide otherwise."""

OWN_PATHS = {
    "config_file",
    "dump_folder",
    "token_cache_folder",
    "tokenizer_path",
    "chat_template_path",
    "dataset_path",
    "dataset_format",
}
"""Keys that may differ between machines: only the files they lead to must be the same."""


def check_agreement(plan: ResolvedJob) -> None:
    """Compare this rank's job, apart from the data, with the others', by `check_same`."""
    model = plan.config.model
    of_tokenizer = tokenizer_parts(plan.tokenizer, model.tokenizer_path, model.chat_template_path)
    libraries = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    check_same(
        {
            # a resume may begin in any stage
            CONFIG: json.dumps([to_json(stage.config) for stage in plan.training_stages]),
            # of a folder: a machine may have another config.json or other tensors there
            "model.flavor": json.dumps(asdict(plan.model_args)),
            "code": f"meshwright {meshwright.__version__}, source {_source_hash()}, "
            f"torch {torch.__version__}, {libraries}",
            "model.tokenizer_path": short_hash(of_tokenizer),
            "experimental.custom_import": plan.own_code,
        }
    )


def check_same(facts: Mapping[str, str]) -> None:
    """Raise unless every rank gives the same facts. Collective.

    A digest is gathered first: the facts of 16,384 ranks would be 61 MiB on each of them.

    Raises:
        ConfigError: on every rank, naming the ranks that differ, in which part, and from which.
    """
    digests = [""] * dist.get_world_size()
    text = json.dumps(facts, sort_keys=True)
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if all(digest == digests[0] for digest in digests):
        return
    mine = (socket.gethostname(), dict(facts))
    gathered: list[tuple[str, dict[str, str]]] = [mine] * len(digests)
    dist.all_gather_object(gathered, mine)

    def named(ranks: Sequence[int]) -> str:
        hosts = sorted({gathered[rank][0] for rank in ranks})
        return f"rank {in_ranges(ranks)} (on {', '.join(hosts[:3])}{', ...' * (len(hosts) > 3)})"

    found = list[tuple[str, str]]()
    for name in sorted({name for _, of_rank in gathered for name in of_rank}):
        by_value = defaultdict[str, list[int]](list)
        for rank, (_, of_rank) in enumerate(gathered):
            by_value[of_rank.get(name, "nothing")].append(rank)
        # most ranks, or the first, are what others differ from
        (usual, most), *others = sorted(by_value.items(), key=lambda one: (-len(one[1]), one[1]))
        found += [
            (name, f"{key}: {named(ranks)}: {here}; {named(most)}: {there}")
            for value, ranks in others
            for key, here, there in _differences(name, value, usual)
        ]
    if found:
        text = "\n  ".join(["ranks do not run the same job:", *(line for _, line in found)])
        fix = "give all machines the same code, config, tokenizer and data"
        key = "" if found[0][0] in (CONFIG, "code") else found[0][0]
        raise ConfigError(key, f"{text}\n  fix: {fix}")


def _differences(name: str, value: str, usual: str) -> Iterator[tuple[str, str, str]]:
    """Yield the differences in one fact, with both values of each."""
    if name != CONFIG:
        yield name, value, usual
        return
    found = dict[str, tuple[str, str]]()
    # of each stage; where one rank has fewer, training.steps of its last differs
    for theirs, ours in zip(json.loads(usual), json.loads(value), strict=False):
        for key, old, new in differences(theirs, ours):
            if key.rpartition(".")[2] not in OWN_PATHS:
                found.setdefault(key, (shown(new), shown(old) + HINTS.get(key, "")))
    yield from ((key, here, there) for key, (here, there) in found.items())


@functools.cache
def _source_hash() -> str:
    """Return a hash of every source file of the package."""
    folder, found = Path(meshwright.__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cpp")]):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _order_attention(plan: ResolvedJob, device: torch.device) -> list[str]:
    """Return the order of torch's kernels of attention on a GPU, if plain attention is used; empty:
    torch's own. The log names the kernel."""
    training, parallelism = plan.config.training, plan.config.parallelism
    has_own = training.mask_documents or parallelism.context_parallel_degree > 1
    if device.type != "cuda" or has_own:
        return []
    specs = (layer.attention for layer in plan.model_args.table.layers)
    spec = next((spec for spec in specs if spec.window is None), None)
    if spec is None:
        return []
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


def _say_done(plan: ResolvedJob) -> None:
    step, steps = plan.resume_step, plan.config.training.steps
    key, what = "training.steps", f"step {step} of {steps}"
    if step < steps:
        key, what = "training.max_epochs", f"step {step}, where the data ends"
    words = "nothing to do: %s holds %s. To train further, raise %s; to start over, use another "
    logger.info(words + "job.dump_folder.", plan.checkpoint_folder, what, key)


def _set_values(
    plan: ResolvedJob, checkpoints: CheckpointManager, trainer: Trainer, found: Manifest | None
) -> None:
    """Load the checkpoint `found`, or set the first values."""
    if found is None:
        initialize_weights(plan, trainer.model, checkpoints.group)
        if trainer.average is not None:
            trainer.average.begin()
        return
    checkpoints.load(trainer.tensors, found)
    for stage in trainer.model.stages:
        stage.init_buffers()
