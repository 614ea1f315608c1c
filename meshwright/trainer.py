"""This rank's model and its optimizer, and the step that the config asks for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright.batch import Batch
from meshwright.build import build_model, learning_rate
from meshwright.health import BadStepDetector
from meshwright.metrics.phases import Phase, Phases
from meshwright.optim.optimizer_in_backward import OptimizerInBackward
from meshwright.optim.optimizers import build_optimizer, set_learning_rate
from meshwright.parallelisms.gradients import group_of
from meshwright.parallelisms.local_model import Allocate, allocate
from meshwright.parallelisms.meshes import Meshes
from meshwright.preflight import Plan
from meshwright.step import StepOptions, StepResult, train_step

if TYPE_CHECKING:
    from meshwright.checkpoint.state import TrainingTensors


class Trainer:
    """A job's training, without its data, its checkpoints and its reports. Collective.

    Attributes:
        model: its values are arbitrary until they are set or loaded.
        optimizer: built after the model was parallelised.
        lr_at: the learning rate at each step, counted from 1.
        norm_groups: parts of the model whose gradient norms are wanted, in order.
        phases: adds up the times of the parts of steps.
    """

    def __init__(
        self,
        plan: Plan,
        meshes: Meshes,
        device: torch.device,
        *,
        allocate: Allocate = allocate,
        note: Callable[[Phase], None] | None = None,
    ) -> None:
        """
        Args:
            note: gets each phase of each step as it begins.
        """
        config = plan.config
        self._meshes = meshes
        self.model = build_model(plan, meshes, device, allocate=allocate)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        is_early = config.optimizer.early_step_in_backward
        self._early = OptimizerInBackward(self.optimizer) if is_early else None
        self.lr_at = learning_rate(config)
        self.phases = Phases(device, note)
        names = plan.model_args.parameter_names() if config.metrics.grad_norm_by_group else ()
        self.norm_groups = list(dict.fromkeys(map(group_of, names)))
        self._options = StepOptions(
            max_norm=config.training.max_norm,
            reduce_every_microbatch=(
                config.parallelism.fsdp_reduce_gradients == "every_microbatch"
            ),
            reshard_every_microbatch=config.parallelism.fsdp_reshard_after_forward != "never",
            norm_groups=self.norm_groups,
        )

    @property
    def tensors(self) -> "TrainingTensors":
        """Everything that a checkpoint holds as tensors."""
        from meshwright.checkpoint.state import TrainingTensors  # takes up to 0.8 s

        return TrainingTensors(self.model, self.optimizer, dist.get_rank())

    def step(
        self,
        step: int,
        batches: Sequence[Batch],
        detector: BadStepDetector,
        max_norm: float | None = None,
    ) -> StepResult:
        """Take the optimizer step of that number.

        Args:
            batches: as `train_step` takes them.
            max_norm: in the place of the config's.
        """
        set_learning_rate(self.optimizer, self.lr_at(step))
        options = self._options
        if max_norm is not None:
            options = dataclasses.replace(options, max_norm=max_norm)
        return train_step(
            self.model,
            batches,
            self.optimizer,
            self._early,
            step=step,
            meshes=self._meshes,
            detector=detector,
            options=options,
            phases=self.phases,
        )
