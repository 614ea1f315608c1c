"""Statistics of each layer at every k-th step, the same on any mesh but for rounding."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.models.attention_logits import max_logits
from meshwright.models.decoder import Routing
from meshwright.models.loss import Batch, SummedLoss
from meshwright.models.parameter import block_of
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.context_parallel import gather_in_order
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import local_shard
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
        # only our core is known to compute logits from these arguments
        self._attending = [
            f"layers.{number}"
            for number, one in spec.attentions.items()
            if "core" in one.bare_modules and not one.has_own_core
        ]
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
                self._listen(stack, positions)
            stack.enter_context(_eager(self._model))
            stack.enter_context(_unrouted(self._model))
            stack.enter_context(self._model.with_loss(_NoLoss))
            self._model.forward_all([batch.rows(slice(1))], positions, lambda *_: None)
        reset_after_no_grad(self._model.stages)

    def _listen(self, stack: ExitStack, positions: Tensor) -> None:
        """Have every module of this rank measured until `stack` is left."""
        for stage in self._model.stages:
            modules = {f"layers.{name}": block for name, block in stage.layers.items()}
            named = {"tok_embeddings": stage.tok_embeddings, "norm": stage.norm}
            modules |= {name: module for name, module in named.items() if module is not None}
            for name, module in modules.items():
                add = partial(self._add_activation, self._computing.index(name))
                stack.callback(module.register_forward_hook(add).remove)
            for number, name in enumerate(self._attending):
                if name in modules:
                    core = stage.get_submodule(f"{name}.attention.core")
                    see = partial(self._see_logits, number, positions)
                    hook = core.register_forward_pre_hook(see, with_kwargs=True)
                    stack.callback(hook.remove)

    def _add_activation(self, number: int, _: nn.Module, __: object, output: Any) -> None:
        """Add the squares of a module's result, (1, S/cp/tp, D), or of the first of several."""
        x: Tensor = output[0] if isinstance(output, tuple) else output
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        self._squares[number] += norms.double().square().sum()

    def _see_logits(
        self,
        number: int,
        positions: Tensor,
        _: nn.Module,
        args: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        """Note the largest logit of attention to the arguments of `CausalAttention`."""
        q, k, _values, *masks = args
        if k.shape[2] < self._num_tokens:  # latent attention has gathered them
            k = gather_in_order(k, self._meshes.cp)
        given = {key: value for key, value in options.items() if key in ("window", "soft_cap")}
        mask = masks[0] if masks else None
        own = max_logits(q, k, mask, scale=options["scale"], positions=positions, **given)
        self._logits[number] = torch.maximum(self._logits[number], own.max())

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
            "max_attention_logit": (self._attending, self._logits),
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


class _NoLoss(SummedLoss):
    """Replaces a model's loss, which statistics of layers don't need."""

    def __init__(self, _: SummedLoss) -> None:
        super().__init__()

    def __call__(
        self, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor | None = None
    ) -> Tensor:
        return torch.zeros((), device=x.device)


@contextmanager
def _unrouted(model: LocalModel) -> Iterator[None]:
    """Within, routers choose by themselves, unseen by who records or prescribes the experts of a
    step."""
    routings = [stage.routing for stage in model.stages]
    for stage in model.stages:
        stage.routing = Routing()
    try:
        yield
    finally:
        for stage, routing in zip(model.stages, routings, strict=True):
            stage.routing = routing


@contextmanager
def _eager(model: LocalModel) -> Iterator[None]:
    """Within, blocks run as if they weren't compiled, so that hooks inside them aren't, either.
    Masks and cores of attention stay as they are: uncompiled, flex attention makes a matrix of all
    pairs of tokens."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes 0.8 s
        yield
        return

    def in_default_stance(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with torch.compiler.set_stance("default"):
                return make(*args)

        return call

    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for stage in model.stages:
            stage.masks = in_default_stance(stage.masks)  # type: ignore[method-assign]
            stack.callback(delattr, stage, "masks")
            for name, module in stage.named_modules():
                if name.endswith(".attention.core"):
                    before = module.register_forward_pre_hook(_set_default_stance)
                    after = module.register_forward_hook(_set_eager_stance)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
        yield


def _set_default_stance(*_: object) -> None:
    torch.compiler.set_stance("default")


def _set_eager_stance(*_: object) -> None:
    torch.compiler.set_stance("force_eager")
