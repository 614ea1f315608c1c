"""QK-clip: weights of queries and keys become smaller where attention logits are too large."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.loss import Batch
from meshwright.models.table import AttentionSpec, DecoderSpec
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import local_box
from meshwright.train.extra_forward import forward_once_more, layers_with_logits, watch_logits


class QKClip:
    """Measures the largest logit of each head in the global batch by one more forward of a step,
    and lowers weights after its update where that is above a threshold.

    A head's factor is the threshold over its largest logit, at most 1. Query heads that share a key
    head have the factor of the largest of their logits, and `AttentionSpec.logit_rows` says which
    weights take which part of it. Every rank computes the same factors, and multiplies its shards.
    Every method is collective.

    Source: Kimi Team 2025, arXiv:2507.20534, section 2.1 and algorithm 1.

    Args:
        spec: of the whole model.
        threshold: of logits, tau in the report.
        interval: steps from one measurement to the next.
    """

    def __init__(
        self,
        model: LocalModel,
        meshes: Meshes,
        spec: DecoderSpec,
        threshold: float,
        interval: int,
    ) -> None:
        self._model, self._meshes = model, meshes
        self._threshold, self._interval = threshold, interval
        self._specs: Mapping[int, AttentionSpec] = {
            layer: spec.attentions[layer] for layer in layers_with_logits(spec)
        }
        self._largest: dict[int, Tensor] = {}

    def is_due(self, step: int) -> bool:
        """Return whether logits are measured at `step`, counted from 1."""
        return step % self._interval == 0

    def measure(self, batches: Sequence[Batch], positions: Tensor) -> None:
        """Measure the largest logits with the weights that a step starts with.

        Args:
            batches: the microbatches of the step; tokens and labels are (B, S/cp).
            positions: (S/cp,) int64 of the tokens.
        """
        self._largest = {
            layer: torch.full((one.n_heads,), -torch.inf, device=positions.device)
            for layer, one in self._specs.items()
        }
        with ExitStack() as stack:
            watch_logits(stack, self._model, self._meshes, positions, self._note)
            forward_once_more(self._model, batches, positions)

    def _note(self, layer: int, largest: Tensor) -> None:
        first = self._meshes.tp.get_local_rank() * len(largest)  # ranks have equal parts of heads
        own = self._largest[layer][first : first + len(largest)]
        own.copy_(torch.maximum(own, largest))

    @torch.no_grad()
    def apply(self, skip_update: Tensor) -> dict[str, Tensor]:
        """Multiply weights, after the update.

        Args:
            skip_update: () bool: leave weights bitwise unchanged.

        Returns:
            The largest of all logits, and the smallest factor, by name, each () fp32.
        """
        of_heads = torch.cat([*self._largest.values()])
        dist.all_reduce(of_heads, dist.ReduceOp.MAX)
        smallest = torch.ones((), device=of_heads.device)
        parameters = dict(self._model.named_parameters())
        sizes = [one.n_heads for one in self._specs.values()]
        for (layer, spec), own in zip(self._specs.items(), of_heads.split(sizes), strict=True):
            factors = clip_factors(own, spec.n_kv_heads, self._threshold)
            factors = factors.where(~skip_update, 1.0)
            smallest = torch.minimum(smallest, factors.min())
            for name, parts in spec.logit_rows.items():
                parameter = parameters.get(f"layers.{layer}.attention.{name}")
                if parameter is None:  # on another stage
                    continue
                shard, (first, *_) = local_box(parameter.detach())
                rows = row_factors(factors, parts, parameter.shape[0])
                rows = rows[first : first + len(shard)].to(shard.device)
                shard.mul_(rows.view(-1, *[1] * (shard.dim() - 1)))
        return {"qk_clip/max_logit": of_heads.max(), "qk_clip/smallest_factor": smallest}


def clip_factors(largest: Tensor, n_kv_heads: int, threshold: float) -> Tensor:
    """(N,) the largest logits of the heads of a layer -> (K,) factors on the logits of the query
    heads of each key head, at most 1; 1 as well where a logit isn't finite, or there is none."""
    groups = largest.view(n_kv_heads, -1).amax(1)
    is_clipped = (groups > threshold) & torch.isfinite(groups)
    return torch.where(is_clipped, threshold / groups, 1.0)


def row_factors(factors: Tensor, parts: Sequence[tuple[int, float]], num_rows: int) -> Tensor:
    """(K,) factors on logits -> (rows,) factors on the rows of a parameter.

    Args:
        parts: of each head's rows, as `AttentionSpec.logit_rows` has them.
    """
    heads = num_rows // sum(size for size, _ in parts)
    of_heads = factors.repeat_interleave(heads // len(factors))
    powers = [of_heads.pow(power).unsqueeze(1).expand(-1, size) for size, power in parts]
    return torch.cat(powers, 1).flatten()
