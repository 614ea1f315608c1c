"""One optimizer step, and the `Trainer` that holds this rank's model and optimizer for it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.metrics.reporter import Phases
from meshwright.models.decoder import Decoder
from meshwright.models.loss import Batch, has_loss
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_part, local_positions
from meshwright.parallelisms.shards import is_fsdp
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.future_labels import count_future_labels, weigh_future
from meshwright.train.layer_stats import LayerStats
from meshwright.train.loss_by_source import LossBySource
from meshwright.train.optim.average import Average
from meshwright.train.optim.gradients import divisor_to_clip, local_square_sums
from meshwright.train.optim.in_backward import OptimizerInBackward
from meshwright.train.optim.optimizers import check_state
from meshwright.train.optim.qk_clip import QKClip
from meshwright.train.optim.update import set_learning_rate, update
from meshwright.train.own_metrics import OwnMetrics, from_limbs, to_limbs

if TYPE_CHECKING:
    from meshwright.checkpoint.state import ModelTensors, TrainingTensors


@dataclass(frozen=True)
class StepResult:
    """The results of a step, on the device."""

    loss: Tensor
    """() fp32: mean over all counted labels of the global batch, the same on every rank."""
    grad_norm: Tensor
    """() fp32: global norm before clipping, the same on every rank."""
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    """Further ones of the model, by name, each (); the same on every rank."""
    group_norms: Tensor | None = None
    """(G,) fp32: norms of groups of gradients before clipping, the same on every rank."""


def summed(*parts: Tensor) -> list[Tensor]:
    """Return the sums of fp32 or int64 numbers over the whole job, int64 exactly on up to 4096
    ranks. Collective: a single one, for all."""
    sent = [to_limbs(part) if part.dtype == torch.int64 else part for part in parts]
    flat = torch.cat([part.flatten() for part in sent])
    dist.all_reduce(flat)
    split = flat.split([part.numel() for part in sent])
    sums = [of_all.view_as(own) for of_all, own in zip(split, sent, strict=True)]
    return [
        from_limbs(of_all) if own.dtype == torch.int64 else of_all
        for of_all, own in zip(sums, parts, strict=True)
    ]


@dataclass
class Trainer:
    """A job's training, without its data, its checkpoints and its reports: its model and optimizer
    on this rank, and settings of a step that stay the same."""

    model: LocalModel
    """From `parallelize`: gradients are summed over ranks, not averaged. Its values are arbitrary
    until they are set or loaded."""
    optimizer: torch.optim.Optimizer
    """Fused."""
    meshes: Meshes
    lr_at: Callable[[int], float]
    """The learning rate at each step, counted from 1."""
    phases: Phases
    """Adds up the times of the parts of steps."""
    early: OptimizerInBackward | None = None
    """If given, each parameter is updated during backward, once its gradient is final. A non-finite
    gradient then blocks only its own parameter, so a first non-finite step may leave the weights
    partly updated. Requires `max_norm` inf."""
    average: Average | None = None
    max_norm: float = float("inf")
    """Bound on the global gradient norm; inf leaves gradients unchanged."""
    reduce_every_microbatch: bool = False
    """Keep sums of sharded gradients between microbatches, not of unsharded ones: less memory for
    more communication. A pipeline ignores it."""
    reshard_every_microbatch: bool = True
    """Free gathered parameters at the end of every microbatch, not of the step only. A pipeline
    ignores it."""
    by_source: LossBySource | None = None
    """Of a mixture."""
    has_checked_state: bool = False
    """Whether the state that the optimizer made at its first update can be saved."""
    own_metrics: OwnMetrics = field(default_factory=lambda: OwnMetrics({}))
    """Not with `early`, which leaves no gradients."""
    norm_groups: Sequence[str] = ()
    """Every `block_of` a parameter, to get their norms too. Not with `early`."""
    layer_stats: LayerStats | None = None
    """Not with `early`."""
    qk_clip: QKClip | None = None
    """Not with `early`."""
    loss_weights: Tensor | None = None
    """(sources,) fp32: factors on the losses of the labels of each source of a mixture; the loss is
    divided by their sum over labels. None: all are 1."""
    mtp_loss_weight: float = 0.3
    """Of the mean over depths of the losses of further tokens, where the model predicts some."""

    @property
    def tensors(self) -> "TrainingTensors":
        """Everything that a checkpoint holds as tensors."""
        from meshwright.checkpoint.state import TrainingTensors  # takes up to 0.8 s

        average = None if self.average is None else self.average.tensors
        return TrainingTensors(self.model, self.optimizer, dist.get_rank(), average)

    def model_tensors(self, dtype: torch.dtype) -> "ModelTensors":
        """Return the weights only, and their means, in `dtype`."""
        from meshwright.checkpoint.state import ModelTensors  # takes up to 0.8 s

        average = None if self.average is None else self.average.tensors
        return ModelTensors(self.model, dtype, average)

    def figures_of(self, step: int, result: StepResult) -> dict[str, float]:
        """Return the metrics of a step by the names that records have for them; waits for the
        device. Collective."""
        on_device = {"loss/train": result.loss, "optim/grad_norm": result.grad_norm}
        on_device |= result.figures
        # one copy, in a type that has every fp32 number and most integers
        values = torch.stack([value.double() for value in on_device.values()]).tolist()
        figures = dict(zip(on_device, values, strict=True))
        # 0 / 0 where no sequence has a target so far ahead; a loss that isn't finite shows in the
        # norm of its gradient
        if math.isfinite(figures["optim/grad_norm"]):
            figures = {
                name: value
                for name, value in figures.items()
                if not (name.startswith("loss/mtp_") and math.isnan(value))
            }
        figures["optim/lr"] = self.lr_at(step)
        if result.group_norms is not None:
            norms = zip(self.norm_groups, result.group_norms.tolist(), strict=True)
            figures |= {f"optim/grad_norm/{group}": norm for group, norm in norms}
        return figures if self.by_source is None else figures | self.by_source.figures()

    def step(self, step: int, batches: Sequence[Batch], detector: BadStepDetector) -> StepResult:
        """Forward and backward over this rank's microbatches, clip, and update once.

        The host never waits for the device, unless parameters are offloaded; callers copy results
        to the host when they need them. If `detector` finds the step bad, weights and optimizer
        state are bitwise unchanged. Collective: every rank of the job must call it, with the same
        number of microbatches.

        Args:
            step: counted from 1.
            batches: the microbatches, on the device; ranks that differ only along pp, cp or tp have
                the same.
        """
        model, meshes, early = self.model, self.meshes, self.early
        set_learning_rate(self.optimizer, self.lr_at(step))
        mark = self.phases.mark
        mark("communication")
        first = batches[0].tokens
        positions = local_positions(first.shape[1], meshes.cp, first.device)
        batches = [local_part(self.with_loss_weights(batch), positions) for batch in batches]
        num_labels = count_labels(batches, meshes)
        num_future = count_future_labels(batches, meshes)
        batches = weigh_future(batches, num_labels, num_future, self.mtp_loss_weight)
        if self.by_source is not None:
            self.by_source.begin(batches)
        layer_stats = self._layer_stats_at(step)
        if layer_stats is not None:
            mark("layer_stats")
            layer_stats.measure_forward(batches[0], positions)
        qk_clip = self.qk_clip if self.qk_clip is not None and self.qk_clip.is_due(step) else None
        if qk_clip is not None:
            mark("qk_clip")
            qk_clip.measure(batches, positions)
        mark("forward_backward")
        if early is not None:
            early.begin(detector.is_stopped)
        loss = self.forward_backward(batches, positions, num_labels)
        if early is not None:
            early.gradients_are_final = False  # of a backward that is no step
        # before the sum, which can't tell on which rank the loss wasn't finite
        is_finite_here = torch.isfinite(loss)

        squares = self._square_sums(layer_stats, loss.device)
        mark("communication")
        # one all-reduce for all that is added up: each more would cost its latency at every step;
        # ranks of a tp group have the same loss; ranks without the last stage have none
        tells_biases = meshes.stage.get_local_rank() == 0
        of_model = model.balance.sums(loss.device, tells_biases=tells_biases)
        of_depths = model.take_mtp_losses(loss.device) / meshes.tp.size()
        own_metrics = self.own_metrics.measure(model, batches, meshes, loss.device)
        loss, squares, of_model, of_depths, *own_metrics = summed(
            loss / meshes.tp.size(), squares, of_model, of_depths, *own_metrics
        )
        mark("optimizer")
        grad_norm = squares[0].sqrt()
        # a tensor: the host goes on without knowing whether the device skips this update
        skip_update = detector.judge(step, loss, grad_norm, is_finite_here, num_labels)
        if layer_stats is not None:
            layer_stats.keep_weights()  # the size of the update is a difference
        self._update(grad_norm, skip_update)
        clipped = {} if qk_clip is None else qk_clip.apply(skip_update)
        if self.average is not None:
            self.average.after_update(skip_update)
        mtp = zip(range(1, len(of_depths) + 1), of_depths / num_future, strict=True)
        figures = {
            **{f"loss/mtp_{depth}": mean for depth, mean in mtp},
            **model.balance.after_step(of_model, skip_update),
            **self.own_metrics.results(own_metrics),
            **clipped,
        }
        if layer_stats is not None:
            mark("layer_stats")
            figures |= layer_stats.figures(squares[1:].sqrt())
        mark(None)
        group_norms = squares[1:].sqrt() if self.norm_groups else None
        return StepResult(loss, grad_norm, figures, group_norms)

    def forget(self) -> None:
        """Leave nothing of forwards and backwards that were no step: gradients, counts of experts'
        tokens, and losses of further tokens."""
        self.optimizer.zero_grad()
        for stage in self.model.stages:
            stage.init_buffers()

    def with_loss_weights(self, batch: Batch) -> Batch:
        """Return the batch with the factors on the losses of its sequences, if there are some."""
        if self.loss_weights is None:
            return batch
        assert batch.sources is not None  # mixtures tell
        return replace(batch, loss_weights=self.loss_weights[batch.sources])

    def _update(self, grad_norm: Tensor, skip_update: Tensor) -> None:
        """Clip and update, unless backward has updated already."""
        if self.early is None:
            is_clipped = self.max_norm != float("inf")
            # the update's kernel divides; else all gradients would be read and written once more
            divisor = divisor_to_clip(grad_norm, self.max_norm) if is_clipped else None
            update(self.optimizer, skip_update, divisor)
            self.optimizer.zero_grad()
        # not sooner: optimizers make their state in the first update
        if not self.has_checked_state:
            check_state(self.optimizer, self.model.named_parameters())
            self.has_checked_state = True

    def _square_sums(self, layer_stats: LayerStats | None, device: torch.device) -> Tensor:
        """Return this rank's share of the squared norms of all gradients, and of each group."""
        if self.early is not None:  # which has freed the gradients
            return self.early.square_sum.unsqueeze(0)
        groups = self.norm_groups if layer_stats is None else layer_stats.groups
        return local_square_sums(self.model.named_parameters_once(), groups, device)

    def _layer_stats_at(self, step: int) -> LayerStats | None:
        is_due = self.layer_stats is not None and self.layer_stats.is_due(step)
        return self.layer_stats if is_due else None

    def forward_backward(
        self, batches: Sequence[Batch], positions: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Forward and backward of this rank's microbatches; gradients are added up, and reduced.
        Collective.

        Args:
            batches: of a pipeline all of a step; tokens and labels are (B, S/cp).
            positions: (S/cp,) int64 of the tokens.
            num_labels: () that the sum of losses is divided by, from `count_labels`.

        Returns:
            () fp32: this rank's share of the mean loss.
        """
        if self.model.pipeline is not None:
            return self.model.pipeline.run(batches, positions, num_labels)
        return _accumulate(self.model.stages[0], batches, positions, num_labels, self)


def count_labels(batches: Sequence[Batch], meshes: Meshes) -> Tensor:
    """Return how many labels of the global batch count, () int64; with loss weights the sum of
    these over labels, () fp32. Collective.

    The loss is divided by it, once. A mean of the ranks' means would weigh a rank with few labels
    as much as a full one. See docs/architecture.md.
    """
    counts = list[Tensor]()
    for batch in batches:
        of_sequences = has_loss(batch.labels).sum(1)
        if batch.loss_weights is not None:
            of_sequences = of_sequences * batch.loss_weights.double()
        counts.append(of_sequences.sum())
    num_labels = torch.stack(counts).sum()
    dist.all_reduce(num_labels, group=meshes.loss.get_group())
    return num_labels.float() if num_labels.is_floating_point() else num_labels


def _accumulate(
    model: Decoder,
    batches: Sequence[Batch],
    positions: Tensor,
    num_labels: Tensor,
    trainer: "Trainer",
) -> Tensor:
    """Forward and backward of one microbatch after the other; their share of the mean loss."""
    early = trainer.early
    loss = torch.zeros((), device=positions.device)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if is_fsdp(model):
            model.set_requires_gradient_sync(is_last or trainer.reduce_every_microbatch)
            model.set_requires_all_reduce(is_last)  # copies communicate once a step
            model.set_reshard_after_backward(is_last or trainer.reshard_every_microbatch)
            model.set_is_last_backward(is_last)  # otherwise each would wait for its reductions
        if early is not None:
            early.gradients_are_final = is_last
        total = model(batch.tokens, batch.labels, positions=positions, **batch.optional)
        # divided before backward, by the number of the whole step: so gradients need only sums over
        # microbatches and ranks, and no rank's mean has a weight of its own
        share = total / num_labels
        share.backward()
        loss += share.detach()
    return loss
