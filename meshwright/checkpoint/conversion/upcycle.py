"""First weights of a model with experts from those of a dense one."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.initialize import fill_normal
from meshwright.parallelisms.shards import local_box


class Weights(Protocol):
    """The weights in a folder."""

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place."""


class UpcycledWeights:
    """Each expert is a copy of its layer's feed-forward, with noise; routers are fresh.

    Source: Komatsuzaki et al. 2022, arXiv:2212.05055. The noise, as all that is fresh, depends on
    the seed, the parameter's name and the element's index alone, so no mesh changes a bit.

    Args:
        dense: the weights of the dense model.
        table: of the model with experts.
        noise: its deviation, as a share of that of fresh weights.
    """

    def __init__(self, dense: Weights, table: DecoderSpec, noise: float, seed: int) -> None:
        self._dense, self._table, self._noise, self._seed = dense, table, noise, seed

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, and leave the routers' state as it is. Not collective.

        In addition to them there is one matrix of a feed-forward in memory.

        Raises:
            ConfigError: as that of the dense weights.
        """
        fresh = (".experts.", ".router.")
        names = [name for name in parameters if name not in self._table.state]
        kept = [name for name in names if not any(part in name for part in fresh)]
        self._dense.load({name: parameters[name] for name in kept})
        for name in (name for name in names if name not in kept):
            parameter = parameters[name]
            shape, (local, offset) = tuple(parameter.shape), local_box(parameter)
            if not local.numel():
                continue
            is_copy, std = ".experts." in name, self._table.parameters[name].std
            assert std is not None
            std *= self._noise if is_copy else 1
            fill_normal(local, std, self._seed, name, shape, offset)
            if is_copy:
                whole = torch.empty(shape[1:])
                self._dense.load({name.replace(".experts.", ".") + ".weight": whole})
                box = zip(offset[1:], local.shape[1:], strict=True)
                part = whole[tuple(slice(start, start + size) for start, size in box)]
                local.add_(part.to(local.device))
