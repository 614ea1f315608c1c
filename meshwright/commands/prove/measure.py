"""One rank's figures of a few steps, compared with the reference."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import commit
from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import NO_JOB
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.commands.prove.job import (
    SAVED_STEP,
    Books,
    Job,
    Vocabulary,
    calm_post_norms,
    first_cursor,
    open_source,
    show_attention,
    unbalance,
)
from meshwright.commands.prove.measurement import (
    COMPARED,
    LAST_RESUMED_STEP,
    LATER_STEP,
    VALIDATED_STEP,
    Measurement,
    ShardComparison,
)
from meshwright.commands.prove.reductions import narrower, watch_reductions
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.datasets.loader import whole_cursor
from meshwright.datasets.stream import Cursor, OpenSource
from meshwright.metrics.reporter import Phase
from meshwright.metrics.sinks import Record
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.parallelisms.replay import Choices, Replay, record_choices, replay_choices
from meshwright.parallelisms.shards import local_box, part_of_box
from meshwright.system.errors import ConfigError, first_line
from meshwright.system.files import Place
from meshwright.train.facts import look
from meshwright.train.resolve import ResolvedJob, resolve
from meshwright.train.validation import Validation


@functools.cache  # it makes a process group, which is never freed: one for all cases of a pool
def _manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, Checkpoint(enable=True))


class SmallCheckpoint:
    """Where all cases on so many ranks save, one after the other. Every method is collective.

    Args:
        root: a folder that all ranks share.
    """

    def __init__(self, root: Path, world_size: int) -> None:
        self._folder = root / f"checkpoints of {world_size}"
        self._manager = _manager(self._folder)
        if dist.get_rank() == 0:  # from the case before, or from one that broke off
            for step in self._folder.glob("*"):  # a save warns if the folder itself is gone
                shutil.rmtree(step)
        dist.barrier()

    def save(self, job: Job, step: int) -> list[str]:
        """Save; names of the tensors that are not, where this rank holds them, as in `job`.

        Where a part of a tensor lies in the whole is known from the initial values, which one
        process agrees with. So a checkpoint that equals the job is one that any mesh can load.
        """
        data = dataclasses.asdict(whole_cursor(job.cursor))
        manifest = NO_JOB | {"step": step, "data": data, "tokens_seen": job.reporter.tokens_seen}
        self._manager.save(step, job.tensors, manifest, is_last=True)
        path, local = commit.step_folder(self._folder, step), job.state_dict()
        names = read_saved_tensors(Place("proof", path))
        whole = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in local.items()
            if name in names
        }
        CheckpointWeights(Place("proof", path), str).load(whole)
        saved = {name: part_of(tensor, local[name]) for name, tensor in whole.items()}
        wrong = different(local, saved)  # missing ones included
        dist.barrier()  # no rank continues, and saves anew, while another reads
        return wrong

    def resume(self, plan: ResolvedJob, meshes: Meshes, source: OpenSource) -> Job | str:
        """Return a new job that resumes from the checkpoint, or why it cannot be loaded."""
        manifest = self._manager.select_and_verify()
        assert manifest is not None
        cursor, tokens = Cursor.from_json(manifest["data"]), manifest["tokens_seen"]
        job = Job(plan, meshes, source, cursor, tokens)
        for parameter in job.model.parameters():  # memory might still hold the job before
            local_box(parameter.detach())[0].fill_(torch.nan)
        try:
            self._manager.load(job.tensors, manifest)
        except ConfigError as error:  # on every rank
            job.close()
            return first_line(error)
        for stage in job.model.stages:
            stage.init_buffers()
            show_attention(stage)
        return job


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of `whole` that this rank holds of `like`, which is sharded or not."""
    mine, offset = local_box(like)
    return part_of_box(whole, (offset, tuple(mine.shape)))


def different(mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose parts on this rank differ in a bit, or that one of the two
    lacks."""
    return [
        name
        for name in sorted(mine.keys() | wanted.keys())
        if name not in mine
        or name not in wanted
        or not torch.equal(local_box(mine[name])[0], local_box(wanted[name])[0])
    ]


MEAN_OF = "the mean of "
Tensors = dict[str, Tensor]


_meshes = functools.cache(build_meshes)  # groups are never freed: one set for all cases of a mesh


def record_reference(config: JobConfig, file: Path) -> Measurement:
    """Train on this one process; write weights, gradients and updates to `file`."""
    measurement, tensors = _measure(config, 1, file.parent, {})
    whole = {
        kind: {name: local_box(tensor)[0] for name, tensor in of.items()}
        for kind, of in tensors.items()
        if kind != "choices"
    }
    torch.save(whole | {"choices": tensors["choices"]}, file)
    return measurement


def measure(config: JobConfig, world_size: int, file: Path) -> Measurement:
    """Train on this rank's part of the mesh and compare with `file`. Collective."""
    reference = torch.load(file, weights_only=True)
    measurement, tensors = _measure(config, world_size, file.parent, reference["choices"])
    measurement.shards = {kind: _boxes(tensors[kind], reference[kind]) for kind in COMPARED}
    return measurement


def _measure(
    config: JobConfig, world_size: int, folder: Path, told: Mapping[int, tuple[Choices, Tensor]]
) -> tuple[Measurement, dict[str, Any]]:
    """Train, validate, save, and resume; return this rank's tensors of each kind in `COMPARED`, and
    the routers' "choices".

    Args:
        folder: where the checkpoint goes, the same on every rank.
        told: experts to take, and which positions are tokens, by step; steps that are not in it
            take the routers' choices.
    """
    torch.compiler.reset()  # graphs of other cases in this process count against a limit
    plan = resolve(config, look(config, world_size))
    vocabulary = Vocabulary(plan.model_args.vocab_size)
    plan, seen = dataclasses.replace(plan, tokenizer=vocabulary), Measurement()
    training = plan.config.training
    source, held_out = (
        open_source(training, vocabulary.vocab_size, training.seed + n) for n in (0, 1)
    )
    torch.manual_seed(training.seed)
    meshes, cpu = _meshes(plan.dims, "cpu"), torch.device("cpu")
    job = Job(plan, meshes, source, first_cursor(source, training))
    reductions = watch_reductions(job.model.stages)
    _begin(job, training.seed)
    weights = {name: _copy(parameter) for name, parameter in job.model.named_parameters()}
    unbalance(job.model)
    books = Books(plan.config.experts.bias_update_rate)
    choices, replays = dict(told), list[Replay]()
    gradients, done = _keep_gradients(job.model, job.optimizer)
    later: Tensors = {}
    validate = Validation(plan, [held_out], meshes, cpu)
    checkpoint = SmallCheckpoint(folder, world_size)
    for step in range(1, training.steps + 1):
        if step == LATER_STEP and plan.model_args.table.mixtures:
            later, done = _keep_gradients(job.model, job.optimizer)
        with _routed(job, meshes, choices[step][0] if step in told else None) as routed:
            record = _comparable(job.step(step, seen.samples))
        if isinstance(routed, Replay):
            replays.append(routed)
        else:
            choices[step] = routed, job.is_token
        done()
        seen.wrong_counts += books.wrong_counts(job.model, *choices[step])
        seen.losses.append(record.pop("loss/train"))
        seen.grad_norms.append(record.pop("optim/grad_norm"))
        seen.records.append(record)
        if step == VALIDATED_STEP:  # and the steps after it show whether that disturbed anything
            seen.validation = validate(job.model, lambda: False, _fail, job.average)
            again = validate(job.model, lambda: False, _fail, job.average)
            seen.unlike_before = [name for name in again if again[name] != seen.validation[name]]
        if step == SAVED_STEP:
            seen.wrong_in_checkpoint = checkpoint.save(job, step)
            saved = {name: _copy(tensor) for name, tensor in job.state_dict().items()}
        if step == LAST_RESUMED_STEP:
            wanted = {name: _copy(tensor) for name, tensor in job.state_dict().items()}
            updates = _updates(job, weights)
    job.close()
    seen.narrow_reductions = _narrow(reductions, job, meshes, training.mixed_precision_reduce)
    num_tokens = sum(replay.num_tokens for replay in replays)
    seen.other_choices = sum(int(replay.num_others) for replay in replays), num_tokens
    gaps = [torch.zeros(()), *(replay.gap for replay in replays)]
    seen.choice_gap = torch.stack(gaps).max().item()  # which keeps NaN
    tensors = {
        "weights": weights,
        "gradients": gradients,
        "updates": updates,
        "later_gradients": later,
        "choices": choices,
    }
    torch.compiler.reset()
    resumed = checkpoint.resume(plan, meshes, source)
    if isinstance(resumed, str):
        seen.wrong_after_load = [resumed]
    else:
        seen.wrong_after_load = different(resumed.state_dict(), saved)
        _go_on(resumed, meshes, choices, seen)
        seen.wrong_after_resume += different(resumed.state_dict(), wanted)
    return seen, tensors


def _narrow(
    reductions: Mapping[str, torch.dtype], job: Job, meshes: Meshes, wanted: str
) -> list[str]:
    """Return the sums over ranks in a narrower type than `wanted`, as `narrower` does.

    The check below fails if torch reduces in a way that `watch_reductions` does not see.
    """
    is_reduced = meshes.fsdp.size() > 1 and any(p.requires_grad for p in job.model.parameters())
    assert reductions or not is_reduced, "sums of gradients over ranks were not seen"
    return narrower(reductions, getattr(torch, wanted))


def _go_on(
    resumed: Job,
    meshes: Meshes,
    choices: Mapping[int, tuple[Choices, Tensor]],
    seen: Measurement,
) -> None:
    """Take the steps after the saved one again; `seen` gets their samples, and what is unlike."""
    for step in range(SAVED_STEP + 1, LAST_RESUMED_STEP + 1):
        with _routed(resumed, meshes, choices[step][0]):
            record = _comparable(resumed.step(step, seen.resumed_samples))
        wanted = seen.records[step - 1] | {
            "loss/train": seen.losses[step - 1],
            "optim/grad_norm": seen.grad_norms[step - 1],
        }
        names = [name for name in wanted if record.get(name) != wanted[name]]
        seen.wrong_after_resume += [f"{name} of step {step}" for name in names]
    resumed.close()


def _comparable(record: Record) -> Record:
    """Return the figures that don't follow from this machine's speed and memory."""
    phases = {f"time/{phase}_s" for phase in get_args(Phase)}
    return {k: v for k, v in record.items() if k not in phases and not k.startswith("memory/")}


def _begin(job: Job, seed: int) -> None:
    for stage in job.model.stages:
        initialize(stage, seed)
        show_attention(stage)
        calm_post_norms(stage)
    if job.average is not None:
        job.average.begin()


def _updates(job: Job, weights: Tensors) -> Tensors:
    """Return parameters, and their running means, minus `weights`.

    This rank's parts: DTensor would plan a difference for every shape and mesh, for seconds.
    """
    updates: Tensors = {name: _copy(p) for name, p in job.model.named_parameters()}
    if job.average is not None:
        means = job.average.tensors.items()
        updates |= {f"{MEAN_OF}{name}": _copy(mean) for name, mean in means}
    for name, after in updates.items():
        local_box(after)[0].sub_(local_box(weights[name.removeprefix(MEAN_OF)])[0])
    return updates


def _routed(
    job: Job, meshes: Meshes, choices: Choices | None
) -> AbstractContextManager[dict[int, Tensor] | Replay]:
    stages = job.model.stages
    if choices is None:
        return record_choices(stages, meshes)
    return replay_choices(stages, choices, meshes)


def _fail(error: Exception) -> None:
    raise error


def _copy(tensor: Tensor) -> Tensor:
    """Another tensor with the same values and placements."""
    return tensor.detach().clone()


def _keep_gradients(
    model: LocalModel, optimizer: torch.optim.Optimizer
) -> tuple[Tensors, Callable[[], None]]:
    """Gradients as `optimizer` gets them, and how to stop keeping; a missing one counts as zero."""
    kept = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:  # all at once, or one in each call
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept[names[parameter]] = _copy(parameter.grad)

    return kept, optimizer.register_step_pre_hook(keep).remove


def _boxes(local: Tensors, whole: Tensors) -> dict[str, ShardComparison]:
    """Compare this rank's shard of each tensor with that part of the reference's."""
    boxes = {}
    for name, tensor in local.items():
        mine, offset = local_box(tensor)
        theirs = part_of(whole[name], tensor)
        difference = (mine.double() - theirs.double()).square().sum().item()
        different = int((mine != theirs).sum().item())
        boxes[name] = ShardComparison(tuple(offset), tuple(mine.shape), different, difference)
    return boxes
