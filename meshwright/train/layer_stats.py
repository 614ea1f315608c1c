"""Statistics of each layer at every k-th step, the same on any mesh but for rounding."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.loss import Batch
from meshwright.models.parameter import block_of
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import local_shard
from meshwright.train.extra_forward import forward_once_more, layers_with_logits, watch_logits
from meshwright.train.optim.gradients import square_sums

PREFIX = "layer_stats"
"""First part of the names of these metrics."""


class LayerStats:
    """Measures activations and attention logits by one more forward, gradients where the trainer
    has their norms, and updates against a copy of the weights.

    The forward is of the first sequence of the global batch, which every mesh has, with the weights
    that the step starts with. It runs eagerly and without gradients, so the step itself computes
    what it would without. Every method is collective.

    Args:
        spec: of the whole model.
        frozen: names of parameters that aren't trained.
        freq: steps between statistics.

    Attributes:
        groups: every `block_of` a parameter.
    """

    def __init__(
        self,
        model: LocalModel,
        meshes: Meshes,
        spec: DecoderSpec,
        frozen: Collection[str],
        freq: int,
    ) -> None:
        self._model, self._meshes, self._freq = model, meshes, freq
        self._dim = spec.dim
        self.groups: Sequence[str] = list(dict.fromkeys(map(block_of, spec.parameters)))
        self._trained = Counter[str]()  # elements, by group
        for name, parameter in spec.parameters.items():
            if name not in frozen:
                self._trained[block_of(name)] += parameter.numel
        self._computing = [group for group in self.groups if group != "output"]
        self._attending = layers_with_logits(spec)
        self._before: dict[str, Tensor] = {}

    def is_due(self, step: int) -> bool:
        """Return whether `step`, counted from 1, has statistics."""
        return step % self._freq == 0

    @torch.no_grad()
    def measure_forward(self, batch: Batch, positions: Tensor) -> None:
        """Measure activations and attention logits.

        Args:
            batch: the first microbatch of the step; tokens and labels are (B, S/cp).
            positions: (S/cp,) int64 of the tokens.
        """
        device = positions.device
        self._squares = torch.zeros(len(self._computing), dtype=torch.float64, device=device)
        self._logits = torch.full((len(self._attending),), -torch.inf, device=device)
        self._num_tokens = positions.numel() * self._meshes.cp.size()
        with ExitStack() as stack:
            # on the other ranks of dp are other sequences; they help to gather weights
            if self._meshes.dp.get_local_rank() == 0:
                self._listen(stack)
                watch_logits(stack, self._model, self._meshes, positions, self._note_logits)
            forward_once_more(self._model, [batch.rows(slice(1))], positions)

    def _listen(self, stack: ExitStack) -> None:
        """Have the activations of this rank's modules measured until `stack` is left."""
        for stage in self._model.stages:
            modules = {f"layers.{name}": block for name, block in stage.layers.items()}
            named = {"tok_embeddings": stage.tok_embeddings, "norm": stage.norm}
            modules |= {name: module for name, module in named.items() if module is not None}
            for name, module in modules.items():
                add = partial(self._add_activation, self._computing.index(name))
                stack.callback(module.register_forward_hook(add).remove)

    def _add_activation(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        """Add the squares of a module's result, (1, S/cp/tp, D), or of the first of several."""
        x: Tensor = output[0] if isinstance(output, tuple) else output
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        self._squares[number] += norms.double().square().sum()

    def _note_logits(self, layer: int, largest: Tensor) -> None:
        place = self._attending.index(layer)
        self._logits[place] = torch.maximum(self._logits[place], largest.max())

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Keep a copy of this rank's weights, until the optimizer has updated them."""
        parameters = self._model.named_parameters_once()
        self._before = {name: p.detach().clone() for name, p in parameters if p.requires_grad}

    @torch.no_grad()
    def figures(self, gradient_norms: Tensor) -> dict[str, Tensor]:
        """Return the statistics by name, each () fp32, the same on every rank; after the update.

        Args:
            gradient_norms: (G,) fp32, of `groups`, before clipping.
        """
        device, before = gradient_norms.device, self._before
        weights = square_sums(before.items(), self.groups, device)[1:]
        for name, parameter in self._model.named_parameters_once():
            if name in before:  # in its memory
                local_shard(before[name]).sub_(local_shard(parameter.detach()))
        updates = square_sums(before.items(), self.groups, device)[1:]
        self._before = {}
        sums = torch.cat([self._squares, updates, weights])  # fp64
        dist.all_reduce(sums)
        dist.all_reduce(self._logits, dist.ReduceOp.MAX)
        squares, updates, weights = sums.split([len(self._squares), *[len(self.groups)] * 2])
        elements = self._num_tokens * self._dim
        sizes = [self._trained[group] or math.nan for group in self.groups]
        counts = torch.tensor(sizes, dtype=torch.float64, device=device)
        every = {
            "activation_rms": (self._computing, (squares / elements).sqrt()),
            "max_attention_logit": ([f"layers.{n}" for n in self._attending], self._logits),
            "gradient_rms": (self.groups, gradient_norms / counts.sqrt()),
            "update_over_weight": (self.groups, (updates / weights).sqrt()),
        }
        of_weights = ("gradient_rms", "update_over_weight")
        return {
            f"{PREFIX}/{name}/{group}": value
            for name, (groups, values) in every.items()
            for group, value in zip(groups, values.float(), strict=True)
            if name not in of_weights or self._trained[group]
        }
