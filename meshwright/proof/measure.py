"""One rank's figures of a few steps, compared with the reference."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.build import build_validation
from meshwright.config.job_config import JobConfig
from meshwright.models.initialize import initialize, local_box
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import build_meshes
from meshwright.preflight import preflight
from meshwright.proof.data import Vocabulary, open_source
from meshwright.proof.job import Job, calm_post_norms, show_attention
from meshwright.proof.resume import SmallCheckpoint, different, part_of

VALIDATED_STEP, SAVED_STEP, LAST_RESUMED_STEP = 1, 4, 6

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ShardComparison:
    """A rank's shard of a tensor, and its distance from the same part of the reference."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    num_different: int
    """Elements that are not equal to the bit."""
    error: float
    """Square of the 2-norm of the difference."""


@dataclass
class Measurement:
    """Of one rank."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    samples: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and index in the global batch: hash of the sample."""
    weights: dict[str, ShardComparison] = field(default_factory=dict)
    """Initial ones, by name."""
    gradients: dict[str, ShardComparison] = field(default_factory=dict)
    """Of step 1, before clipping, by name."""
    updates: dict[str, ShardComparison] = field(default_factory=dict)
    """Weights after step `LAST_RESUMED_STEP` minus initial ones, by name."""
    validation: dict[str, float] = field(default_factory=dict)
    """Figures of the validation, by name."""
    wrong_in_checkpoint: list[str] = field(default_factory=list)
    """Tensors that differ, where this rank holds them, between the checkpoint and the job."""
    wrong_after_load: list[str] = field(default_factory=list)
    """Tensors that differ between the job that has loaded it and the one that has saved it."""
    wrong_after_resume: list[str] = field(default_factory=list)
    """Differences, to the bit, between the resumed job and the one that continued."""
    resumed_samples: dict[tuple[int, int], str] = field(default_factory=dict)
    """As `samples`, of the steps after the resume."""


_meshes = functools.cache(build_meshes)  # groups are never freed: one set for all cases of a mesh


def record_reference(config: JobConfig, file: Path) -> Measurement:
    """Train on this one process; write weights, gradients and updates to `file`."""
    measurement, tensors = _measure(config, 1, file.parent)
    whole = {
        kind: {name: local_box(tensor)[0] for name, tensor in of.items()}
        for kind, of in tensors.items()
    }
    torch.save(whole, file)
    return measurement


def measure(config: JobConfig, world_size: int, file: Path) -> Measurement:
    """Train on this rank's part of the mesh and compare with `file`. Collective."""
    reference = torch.load(file, weights_only=True)
    measurement, tensors = _measure(config, world_size, file.parent)
    measurement.weights = _boxes(tensors["weights"], reference["weights"])
    measurement.gradients = _boxes(tensors["gradients"], reference["gradients"])
    measurement.updates = _boxes(tensors["updates"], reference["updates"])
    return measurement


def _measure(
    config: JobConfig, world_size: int, folder: Path
) -> tuple[Measurement, dict[str, Tensors]]:
    """Train, validate, save, and resume; and of this rank's parameters the "weights" and the
    "gradients" at step 1, and the "updates", by which the first steps have changed them.

    Args:
        folder: where the checkpoint goes, the same on every rank.
    """
    torch.compiler.reset()  # graphs of other cases in this process count against a limit
    plan = preflight(config, world_size)
    vocabulary = Vocabulary(plan.model_args.vocab_size)
    plan, seen = dataclasses.replace(plan, tokenizer=vocabulary), Measurement()
    training = plan.config.training
    source, held_out = (
        open_source(training, vocabulary.vocab_size, training.seed + n) for n in (0, 1)
    )
    torch.manual_seed(training.seed)
    meshes, cpu = _meshes(plan.dims, "cpu"), torch.device("cpu")
    job = Job(plan, meshes, source)
    for stage in job.model.stages:
        initialize(stage, training.seed)
        show_attention(stage)
        calm_post_norms(stage)
    weights = {name: _copy(parameter) for name, parameter in job.model.named_parameters()}
    gradients, done = _keep_gradients(job.model, job.optimizer)
    validate = build_validation(plan, [held_out], meshes, cpu)
    checkpoint = SmallCheckpoint(folder, world_size)
    for step in range(1, training.steps + 1):
        loss, grad_norm = job.step(step, seen.samples)
        done()
        seen.losses.append(loss)
        seen.grad_norms.append(grad_norm)
        if step == VALIDATED_STEP:  # and the steps after it show whether that disturbed anything
            seen.validation = validate(job.model, lambda: False, _fail)
        if step == SAVED_STEP:
            seen.wrong_in_checkpoint = checkpoint.save(job, step)
            saved = {name: _copy(tensor) for name, tensor in job.state_dict().items()}
        if step == LAST_RESUMED_STEP:
            wanted = {name: _copy(tensor) for name, tensor in job.state_dict().items()}
            now = dict(job.model.named_parameters())
            updates = {name: now[name].detach() - before for name, before in weights.items()}
    job.close()
    tensors = {"weights": weights, "gradients": gradients, "updates": updates}
    torch.compiler.reset()
    resumed, missing = checkpoint.resume(plan, meshes, source)
    seen.wrong_in_checkpoint = sorted({*seen.wrong_in_checkpoint, *missing})
    if resumed is None:
        return seen, tensors
    seen.wrong_after_load = different(resumed.state_dict(), saved)
    for step in range(SAVED_STEP + 1, LAST_RESUMED_STEP + 1):
        figures = resumed.step(step, seen.resumed_samples)
        if figures != (seen.losses[step - 1], seen.grad_norms[step - 1]):
            seen.wrong_after_resume.append(f"loss or gradient norm of step {step}")
    resumed.close()
    seen.wrong_after_resume += different(resumed.state_dict(), wanted)
    return seen, tensors


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


Measure = Callable[[JobConfig, int, Path], Measurement]
