"""One rank's metrics of a few steps, compared with the reference."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.commands.prove.job import ProofJob
from meshwright.commands.prove.measurement import (
    COMPARED,
    LAST_RESUMED_STEP,
    LATER_STEP,
    SAVED_STEP,
    VALIDATED_STEP,
    Measurement,
    ShardComparison,
)
from meshwright.commands.prove.metric_slack import WatchedMetrics
from meshwright.commands.prove.reductions import narrower, watch_reductions
from meshwright.commands.prove.router_accounting import RouterAccounting
from meshwright.commands.prove.weights import in_short_chunks
from meshwright.config.job_config import JobConfig
from meshwright.metrics.reporter import Pause, Phase
from meshwright.metrics.sinks import Record
from meshwright.parallelisms.routing_replay import Choices, Replay, record_choices, replay_choices
from meshwright.parallelisms.shards import local_box, part_of_box
from meshwright.system.errors import ConfigError, first_line
from meshwright.system.files import NamedPath
from meshwright.train.trainer import Trainer

MEAN_OF = "the mean of "
Tensors = dict[str, Tensor]

StepChoices = Mapping[int, tuple[Choices, Tensor]]
"""By step: the experts that tokens go through, and which positions of the batch are tokens."""


@in_short_chunks
def record_reference(config: JobConfig, file: Path, allows_tf32: bool = False) -> Measurement:
    """Train on this one process; write weights, gradients and updates to `file`.

    Args:
        allows_tf32: a GPU may round factors of products in fp32 to TF32.
    """
    measuring = _Measuring(config, 1, file.parent, {}, allows_tf32)
    measuring.run()
    whole = {
        kind: {name: local_box(tensor)[0].cpu() for name, tensor in tensors.items()}
        for kind, tensors in measuring.tensors.items()
    }
    choices = {
        step: ({layer: chosen.cpu() for layer, chosen in of_step.items()}, is_token)
        for step, (of_step, is_token) in measuring.choices.items()
    }
    torch.save(whole | {"choices": choices}, file)
    return measuring.result


@in_short_chunks
def measure(
    config: JobConfig, world_size: int, file: Path, allows_tf32: bool = False
) -> Measurement:
    """Train on this rank's part of the mesh and compare with `file`. Collective."""
    reference = torch.load(file, weights_only=True)
    choices = reference["choices"]
    measuring = _Measuring(config, world_size, file.parent, choices, allows_tf32)
    measuring.run()
    measuring.result.shards = {
        kind: _compare_shards(measuring.tensors[kind], reference[kind]) for kind in COMPARED
    }
    return measuring.result


class _Measuring:
    """Trains a small job, validates, saves and resumes it, and measures each of these.

    Args:
        root: folder for the job's files, the same on every rank.
        reference_choices: experts to take; at other steps routers choose.

    Attributes:
        result: of this rank.
        tensors: this rank's, by kind of `COMPARED` and name.
        choices: of every step that was taken, of all ranks.
    """

    def __init__(
        self,
        config: JobConfig,
        world_size: int,
        root: Path,
        reference_choices: StepChoices,
        allows_tf32: bool = False,
    ) -> None:
        # graphs of other cases in this process count against a limit
        torch.compiler.reset()
        self._job = ProofJob(config, world_size, root)
        self._config = self._job.resolved.config
        # a GPU adds up in any order, unless it is told otherwise
        is_gpu = self._job.meshes.world.device_type == "cuda"
        if is_gpu:
            torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
        self._is_bitwise = self._config.training.deterministic or not is_gpu
        self._watched = WatchedMetrics(self._job.trainer.own_metrics)
        if world_size == 1:
            self._job.trainer.own_metrics = self._watched
        self._reductions = watch_reductions(self._job.model.stages)
        self._accounting = RouterAccounting(self._config.experts.bias_update_rate)
        self._replays = list[Replay]()
        self._at_save: Tensors = {}
        self._at_end: Tensors = {}
        self.result = Measurement()
        self.choices = dict(reference_choices)
        self.tensors: dict[str, Tensors] = {"later_gradients": {}, "weights": self._weights()}

    def run(self) -> None:
        """Measure everything."""
        after = {
            VALIDATED_STEP: self._validate_twice,
            SAVED_STEP: self._save,
            LAST_RESUMED_STEP: self._keep_end,
        }
        for step in range(1, self._config.training.steps + 1):
            self._take(step)
            if step in after:
                after[step]()
        self._sum_up()
        torch.compiler.reset()
        self._resume()
        self._job.close()

    def _weights(self) -> Tensors:
        return {name: _copy(weight) for name, weight in self._job.model.named_parameters()}

    def _take(self, step: int) -> None:
        """Take a step, and measure it."""
        prescribed = self.choices.get(step, (None,))[0]
        with self._keeping_gradients(step), self._routed(prescribed) as routed:
            record = _comparable(self._job.step(step, self.result.samples))
        if isinstance(routed, Replay):
            self._replays.append(routed)
        else:
            self.choices[step] = routed, self._job.is_token
        wrong = self._accounting.wrong_counts(self._job.model, *self.choices[step])
        self.result.wrong_counts += wrong
        self.result.losses.append(record.pop("loss/train"))
        self.result.grad_norms.append(record.pop("optim/grad_norm"))
        self.result.records.append(record)
        self.result.slack.append(self._watched.slack)

    def _keeping_gradients(self, step: int) -> AbstractContextManager[None]:
        kinds = {1: "gradients"}
        if self._job.resolved.model_args.table.mixtures:
            kinds[LATER_STEP] = "later_gradients"
        if step not in kinds:
            return contextlib.nullcontext()
        return _keeping_gradients(self._job.trainer, self.tensors.setdefault(kinds[step], {}))

    def _routed(
        self, choices: Choices | None
    ) -> AbstractContextManager[dict[int, Tensor] | Replay]:
        """Record which experts tokens go through, or let them go through `choices`."""
        stages, meshes = self._job.model.stages, self._job.meshes
        if choices is None:
            return record_choices(stages, meshes)
        return replay_choices(stages, choices, meshes)

    def _validate_twice(self) -> None:
        """Validate; the steps that follow show whether this disturbed anything."""
        first, second = self._job.validate(), self._job.validate()
        self.result.validation = first
        if self._is_bitwise:
            self.result.unlike_before = [name for name in second if second[name] != first[name]]

    def _save(self) -> None:
        """Save, and note the tensors that aren't, where this rank holds them, as in the job.

        Where a part of a tensor lies in the whole is known from the initial values, which one
        process agrees with. So a checkpoint that equals the job is one that any mesh can load.
        """
        folder, state = NamedPath("proof", self._job.save()), self._job.state_dict()
        names = read_saved_tensors(folder)
        whole = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in state.items()
            if name in names
        }
        CheckpointWeights(folder, str).load(whole)
        saved = {name: part_of(tensor, state[name]) for name, tensor in whole.items()}
        self.result.wrong_in_checkpoint = different(state, saved)  # missing ones included
        self._at_save = {name: _copy(tensor) for name, tensor in state.items()}
        dist.barrier()  # no rank continues, and saves anew, while another reads

    def _keep_end(self) -> None:
        """Keep the state that the resumed job must reach, and the updates so far."""
        self._at_end = {name: _copy(tensor) for name, tensor in self._job.state_dict().items()}
        updates, average = self._weights(), self._job.trainer.average
        if average is not None:
            updates |= {f"{MEAN_OF}{name}": _copy(mean) for name, mean in average.tensors.items()}
        # this rank's parts: DTensor would plan a difference for every shape and mesh, for seconds
        for name, after in updates.items():
            before = self.tensors["weights"][name.removeprefix(MEAN_OF)]
            local_box(after)[0].sub_(local_box(before)[0])
        self.tensors["updates"] = updates

    def _sum_up(self) -> None:
        """Measure what was noted during all steps."""
        model, result = self._job.model, self.result
        is_sharded = self._job.meshes.fsdp.size() > 1
        is_reduced = is_sharded and any(p.requires_grad for p in model.parameters())
        # fails if torch reduces in a way that `watch_reductions` doesn't see
        assert self._reductions or not is_reduced, "sums of gradients over ranks were not seen"
        reduce_type = getattr(torch, self._config.training.mixed_precision_reduce)
        result.narrow_reductions = narrower(self._reductions, reduce_type)
        num_others = sum(int(replay.num_others) for replay in self._replays)
        result.other_choices = num_others, sum(replay.num_tokens for replay in self._replays)
        gaps = [torch.zeros(()), *(replay.gap.cpu() for replay in self._replays)]
        result.choice_gap = torch.stack(gaps).max().item()  # which keeps NaN

    def _resume(self) -> None:
        """Resume from the checkpoint, and take the steps after it again."""
        result = self.result
        try:
            self._job.resume()
        except ConfigError as error:
            result.wrong_after_load = [first_line(error)]
            return
        result.wrong_after_load = different(self._job.state_dict(), self._at_save)
        if not self._is_bitwise:
            return
        for step in range(SAVED_STEP + 1, LAST_RESUMED_STEP + 1):
            with self._routed(self.choices[step][0]):
                record = _comparable(self._job.step(step, result.resumed_samples))
            wanted = result.records[step - 1] | {
                "loss/train": result.losses[step - 1],
                "optim/grad_norm": result.grad_norms[step - 1],
            }
            names = [name for name in wanted if record.get(name) != wanted[name]]
            result.wrong_after_resume += [f"{name} of step {step}" for name in names]
        result.wrong_after_resume += different(self._job.state_dict(), self._at_end)


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
        or not torch.equal(local_box(mine[name])[0].cpu(), local_box(wanted[name])[0].cpu())
    ]


def _comparable(record: Record) -> Record:
    """Return the metrics that don't follow from this machine's speed and memory."""
    times = {f"time/{phase}_s" for phase in (*get_args(Phase), *get_args(Pause))}
    return {k: v for k, v in record.items() if k not in times and not k.startswith("memory/")}


def _copy(tensor: Tensor) -> Tensor:
    """Another tensor with the same values and placements."""
    return tensor.detach().clone()


@contextlib.contextmanager
def _keeping_gradients(trainer: Trainer, gradients: Tensors) -> Iterator[None]:
    """Fill `gradients`, as the optimizer gets them; a missing one counts as zero."""
    gradients.update({name: torch.zeros_like(p) for name, p in trainer.model.named_parameters()})
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:  # all at once, or one in each call
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients[names[parameter]] = _copy(parameter.grad)

    hook = trainer.optimizer.register_step_pre_hook(keep)
    yield
    hook.remove()


def _compare_shards(local: Tensors, whole: Tensors) -> dict[str, ShardComparison]:
    """Compare this rank's shard of each tensor with that part of the reference's."""
    comparisons = {}
    for name, tensor in local.items():
        mine, offset = local_box(tensor)
        mine, theirs = mine.cpu(), part_of(whole[name], tensor)
        difference = (mine.double() - theirs.double()).square().sum().item()
        num_different = int((mine != theirs).sum().item())
        comparisons[name] = ShardComparison(
            tuple(offset), tuple(mine.shape), num_different, difference
        )
    return comparisons
