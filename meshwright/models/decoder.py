"""The contract between a model and everything around it: names only, no behaviour."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from meshwright.models.layers.projection import TiedProjection


class Decoder(nn.Module, ABC):
    """What parallelism, initialisation and the trainer rely on in a model.

    Names of parameters are those of its checkpoints.
    """

    tok_embeddings: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module
    output: nn.Linear | TiedProjection

    @abstractmethod
    def init_buffers(self) -> None:
        """Fill every non-persistent buffer, on the device where it is."""

    @abstractmethod
    def initial_std(self, name: str) -> float | None:
        """Standard deviation that the parameter `name` starts with; None: it starts at one."""

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, S) int64 -> (B, S, V) logits; `positions` (S,) int64 of the tokens, else 0 .. S-1."""
