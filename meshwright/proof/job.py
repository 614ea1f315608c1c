"""The trainer's own parts, put together as it does, for a few steps."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.build import build_loader, build_model, learning_rate
from meshwright.checkpoint.state import RNG, TrainingTensors
from meshwright.datasets.global_order import Cursor
from meshwright.datasets.opening import OpenSource
from meshwright.health import Health
from meshwright.models.decoder import Decoder
from meshwright.optim.early_step import EarlyStep
from meshwright.optim.optimizers import build_optimizer, set_learning_rate
from meshwright.parallelisms.meshes import Meshes
from meshwright.preflight import Plan
from meshwright.step import train_step

STRETCH = (8.0, 16.0)
"""Of queries and keys at the first and at the last position."""
STRETCH_NORMALISED = (1.0, 2.0)
"""The same, of queries and keys that the model normalises."""


class Job:
    """One rank's part of a small job. Its weights are arbitrary until somebody sets them.

    Args:
        source: in the place of the config's.
        cursor: where it begins to read.
    """

    def __init__(
        self, plan: Plan, meshes: Meshes, source: OpenSource, cursor: Cursor | None = None
    ) -> None:
        device, config = torch.device("cpu"), plan.config
        self._plan, self._meshes = plan, meshes
        self.model = build_model(plan, meshes, device)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        is_early = config.optimizer.early_step_in_backward
        self._early = EarlyStep(self.optimizer) if is_early else None
        self.cursor = cursor or Cursor()
        self._loader = build_loader(plan, [source], meshes, device, self.cursor)
        self._health, self._lr_at = Health.on(device), learning_rate(config)

    def step(self, step: int, samples: dict[tuple[int, int], str]) -> tuple[float, float]:
        """One optimizer step: its loss, and its gradient norm. Collective.

        Args:
            samples: gets the hashes of this rank's, by step and index in the global batch.
        """
        data, dims = next(self._loader), self._plan.dims
        self.cursor = data.cursor
        for number, batch in enumerate(data.batches):
            first = (number * dims.dp + self._meshes.dp.get_local_rank()) * len(batch.tokens)
            parts = [p for p in (batch.tokens, batch.labels, batch.documents) if p is not None]
            for index, sample in enumerate(zip(*parts, strict=True), first):
                samples[step, index] = _hash(*sample)
        set_learning_rate(self.optimizer, self._lr_at(step))
        reduction = self._plan.config.parallelism.fsdp_reduce_gradients
        result = train_step(
            self.model,
            data.batches,
            self.optimizer,
            self._early,
            step=step,
            # the first step shows gradients as they are
            max_norm=self._plan.config.training.max_norm if step > 1 else float("inf"),
            meshes=self._meshes,
            health=self._health,
            reduce_every_microbatch=reduction == "every_microbatch",
        )
        return result.loss.item(), result.grad_norm.item()

    @property
    def tensors(self) -> TrainingTensors:
        """All that a checkpoint holds."""
        return TrainingTensors(self.model, self.optimizer, dist.get_rank())

    def state_dict(self) -> dict[str, Tensor]:
        """Of `tensors`, those of the model and of the optimizer."""
        state = self.tensors.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(RNG)}

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()


def show_attention(stage: Decoder) -> None:
    """Stretch the rotary cache of `stage`, more towards its end, in place.

    Initial queries and keys are so small that attention is nearly a mean of what it sees: which
    token is where would hardly show. And rotary attention sees nothing but distances: if documents
    did not begin at position 0, each query would still see its own keys at the right ones. Here
    scores are of order 1, and depend on places. Queries and keys that are normalised make such
    scores by themselves: stretched as far, attention would be chaotic, and rounding would grow.
    """
    is_normalised = any(block.attention.qk_norm for block in stage.table.blocks)
    stretch = STRETCH_NORMALISED if is_normalised else STRETCH
    for cache in stage.buffers():  # (S, H/2) each
        cache *= torch.linspace(*stretch, len(cache)).unsqueeze(1)


def _hash(*parts: Tensor) -> str:
    data = torch.cat(parts).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
