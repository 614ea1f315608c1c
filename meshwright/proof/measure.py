"""What one rank sees when it trains a few steps, held against the reference."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.build import build_loader, build_model, learning_rate
from meshwright.config.job_config import JobConfig
from meshwright.datasets.global_order import Cursor
from meshwright.datasets.opening import open_training_data
from meshwright.health import Health
from meshwright.models.initialize import initialize, local_box
from meshwright.optim.early_step import EarlyStep
from meshwright.optim.optimizers import build_optimizer, set_learning_rate
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import build_meshes
from meshwright.preflight import preflight
from meshwright.step import train_step

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Box:
    """What a rank holds of a tensor, and how far it is from the same part of the reference."""

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
    """By step and index in the global batch: hash of what was read."""
    weights: dict[str, Box] = field(default_factory=dict)
    """Initial ones, by name."""
    gradients: dict[str, Box] = field(default_factory=dict)
    """Of step 1, before clipping, by name."""


_meshes = functools.cache(build_meshes)  # groups are never freed: one set for all cases of a mesh


def record_reference(config: JobConfig, file: Path) -> Measurement:
    """Train on this one process; write weights and gradients to `file`."""
    measurement, weights, gradients = _train(config, 1)
    torch.save({"weights": weights, "gradients": gradients}, file)
    return measurement


def measure(config: JobConfig, world_size: int, file: Path) -> Measurement:
    """Train on this rank's part of the mesh and compare with `file`. Collective."""
    reference = torch.load(file, weights_only=True)
    measurement, weights, gradients = _train(config, world_size)
    measurement.weights = _boxes(weights, reference["weights"])
    measurement.gradients = _boxes(gradients, reference["gradients"])
    return measurement


def _train(config: JobConfig, world_size: int) -> tuple[Measurement, Tensors, Tensors]:
    """The trainer's own parts, in its order; and this rank's weights and gradients at step 1."""
    torch.compiler.reset()  # what other cases compiled in this process counts against a limit
    plan, device, seen = preflight(config, world_size), torch.device("cpu"), Measurement()
    training = plan.config.training
    torch.manual_seed(training.seed)
    meshes = _meshes(plan.dims, device.type)
    model = build_model(plan, meshes, device)
    optimizer = build_optimizer(model.named_parameters(), plan.config.optimizer)
    for stage in model.stages:
        initialize(stage, training.seed)
    weights = {name: _copy(parameter) for name, parameter in model.named_parameters()}
    early = EarlyStep(optimizer) if plan.config.optimizer.early_step_in_backward else None
    gradients, done = _keep_gradients(model, optimizer)
    loader = build_loader(plan, open_training_data(plan.config), meshes, device, Cursor())
    reduction = plan.config.parallelism.fsdp_reduce_gradients
    health, lr_at = Health.on(device), learning_rate(plan.config)
    for step in range(1, training.steps + 1):
        batches = next(loader).batches
        for number, batch in enumerate(batches):
            first = (number * plan.dims.dp + meshes.dp.get_local_rank()) * len(batch.tokens)
            parts = [p for p in (batch.tokens, batch.labels, batch.documents) if p is not None]
            for index, sample in enumerate(zip(*parts, strict=True), first):
                seen.samples[step, index] = _hash(*sample)
        set_learning_rate(optimizer, lr_at(step))
        result = train_step(
            model,
            batches,
            optimizer,
            early,
            step=step,
            max_norm=training.max_norm
            if step > 1
            else float("inf"),  # to see gradients as they are
            meshes=meshes,
            health=health,
            reduce_every_microbatch=reduction == "every_microbatch",
        )
        done()
        seen.losses.append(result.loss.item())
        seen.grad_norms.append(result.grad_norm.item())
    loader.close()
    return seen, weights, gradients


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


def _boxes(local: Tensors, whole: Tensors) -> dict[str, Box]:
    """Compare what this rank holds of each tensor with that part of the reference's."""
    boxes = {}
    for name, tensor in local.items():
        mine, offset = local_box(tensor)
        theirs = whole[name]
        for dim, (start, length) in enumerate(zip(offset, mine.shape, strict=True)):
            theirs = theirs.narrow(dim, min(start, theirs.shape[dim]), length)
        difference = (mine.double() - theirs.double()).square().sum().item()
        different = int((mine != theirs).sum().item())
        boxes[name] = Box(tuple(offset), tuple(mine.shape), different, difference)
    return boxes


def _hash(*parts: Tensor) -> str:
    data = torch.cat(parts).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


Measure = Callable[[JobConfig, int, Path], Measurement]
