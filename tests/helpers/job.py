"""A job on a mesh, step by step, and the same steps in plain PyTorch on one device."""

import dataclasses
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from meshwright.checkpoint.state import TrainingTensors
from meshwright.metrics.reporter import Phases
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.optim.in_backward import OptimizerInBackward
from meshwright.train.optim.update import LR_SCALE
from meshwright.train.trainer import StepResult, Trainer
from tests.helpers.rounding import adamw
from tests.helpers.tiny import CPU, SEQ_LEN, TINY, parallel_model, whole

GLOBAL_BATCH = 8
DEEP = dataclasses.replace(TINY, n_layers=5)  # uneven on four stages
SCHEDULES = {
    **{name: {"schedule": name} for name in ("GPipe", "1F1B")},
    **{
        name: {"schedule": name, "stages_per_rank": 2}
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
}


def mesh(dp_replicate: int = 1, dp_shard: int = 1, **axes: int) -> ParallelDims:
    return ParallelDims(dp_replicate=dp_replicate, dp_shard=dp_shard, **axes)


PP = mesh(pp=2)
DOCUMENTS = torch.arange(SEQ_LEN, dtype=torch.int32).div(5, rounding_mode="floor")
DOCUMENTS = DOCUMENTS.expand(GLOBAL_BATCH, -1)
"""Of `global_batch`: four in each sequence."""


def frozen(*patterns: str, args: LlamaArgs = TINY) -> dict[str, frozenset[str]]:
    """As the trainer makes it of `model.frozen`."""
    names = args.table.parameters
    return {"frozen": frozenset(n for n in names if any(fnmatchcase(n, p) for p in patterns))}


def global_batch(
    step: int, sequences: int = GLOBAL_BATCH, length: int = SEQ_LEN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels are missing very unevenly: a mean of the ranks' means would be far off."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TINY.vocab_size, (sequences, length), generator=generator)
    labels = torch.randint(TINY.vocab_size, (sequences, length), generator=generator)
    labels[0] = labels[1, 3:] = labels[5, ::2] = IGNORE
    return tokens, labels


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    max_norm: float = 0.5,
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = global_batch,
) -> list[tuple[float, float]]:
    """Take the steps in a loop of PyTorch; return the loss and gradient norm of each."""
    figures = []
    for step in steps:
        tokens, labels = batch_of(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item()))
    return figures


class Job:
    """A model, its meshes and its optimizer.

    Args:
        optimizer_of: builds it of the model.
        options: of `parallel_model`.
    """

    def __init__(
        self,
        dims: ParallelDims,
        seed: int = 0,
        num_microbatches: int = 1,
        is_early: bool = False,
        *,
        num_sequences: int = GLOBAL_BATCH,
        optimizer_of: Callable[[LocalModel], torch.optim.Optimizer] = adamw,
        detector: BadStepDetector | None = None,
        **options: object,
    ) -> None:
        self.size = num_sequences // (dims.dp * num_microbatches)
        self.model: LocalModel
        self.meshes: Meshes
        self.model, self.meshes = parallel_model(
            dims, seed=seed, microbatches=(num_microbatches, self.size), **options
        )
        self.optimizer = optimizer_of(self.model)
        group = self.optimizer.param_groups[0]
        lr = group["lr"] / group[LR_SCALE]
        early = OptimizerInBackward(self.optimizer) if is_early else None
        self.trainer = Trainer(
            self.model, self.optimizer, self.meshes, lambda step: lr, Phases(CPU), early
        )
        self.detector = detector or BadStepDetector(CPU)
        self.tensors = TrainingTensors(self.model, self.optimizer, dist.get_rank())

    def part(self, batch: Batch) -> list[Batch]:
        """This rank's microbatches of a global batch."""
        dp = self.meshes.dp
        parts = {
            name: part.split(self.size)[dp.get_local_rank() :: dp.size()]
            for name, part in vars(batch).items()
            if part is not None
        }
        batches = zip(*parts.values(), strict=True)
        return [Batch(**dict(zip(parts, own, strict=True))) for own in batches]

    def batches(self, step: int) -> list[Batch]:
        return self.part(Batch(*global_batch(step)))

    def take_step(
        self, step: int = 1, batches: list[Batch] | None = None, **options: object
    ) -> StepResult:
        """Of `batches`, or of this rank's part of `global_batch(step)`; options of the trainer."""
        batches = self.batches(step) if batches is None else batches
        return dataclasses.replace(self.trainer, **options).step(step, batches, self.detector)

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Return a table that each step fills with the gradients of its update."""
        gradients: dict[str, torch.Tensor] = {}

        def keep(*_: object) -> None:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = whole(parameter.grad).clone()

        self.optimizer.register_step_pre_hook(keep)
        return gradients

    def forward(self, step: int) -> torch.Tensor:
        """Logits of a microbatch."""
        tokens = self.batches(step)[0].tokens
        return self.model.stages[0](tokens, positions=torch.arange(tokens.shape[1]))

    def save(self, folder: str) -> None:
        dcp.save(self.tensors.state_dict(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.tensors.state_dict()
        dcp.load(state, checkpoint_id=folder)
        self.tensors.load_state_dict(state)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in self.model.named_parameters()}


def job_of(dims: ParallelDims, options: dict) -> tuple[Job, torch.Tensor | None]:
    """A job with microbatches enough for any schedule, and the documents among its options."""
    others = {name: value for name, value in options.items() if name != "documents"}
    job = Job(dims, **({"num_microbatches": 4 if dims.pp > 1 else 1} | others))
    return job, options.get("documents")


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
