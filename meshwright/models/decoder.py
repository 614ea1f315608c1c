"""The contract between a model and everything around it: names only, no behaviour."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from meshwright.models.layers.projection import TiedProjection


class Decoder(nn.Module, ABC):
    """What parallelism, initialisation and the trainer rely on in a model.

    Names of parameters are those of its checkpoints. A stage of a pipeline is a decoder without
    the modules of other stages: `layers` has some of the blocks, under their own names, and what
    else is absent is None.
    """

    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    output: nn.Linear | TiedProjection | None

    @abstractmethod
    def init_buffers(self) -> None:
        """Fill every non-persistent buffer, on the device where it is."""

    @abstractmethod
    def initial_std(self, name: str) -> float | None:
        """Standard deviation that the parameter `name` starts with; None: it starts at one."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """(B, S) int64 -> (B, S, V) logits.

        A stage without the embedding takes (B, S, D) instead; one without the output gives it.

        Args:
            positions: (S,) or (B, S) int64 of the tokens in their sequence, else 0 .. S-1.
            documents: (B, S) int: which document of its sequence each position belongs to, rising
                from 0. Attention then stops between them, and the positions that it rotates by
                begin at 0 in each. Of whole sequences, also where `tokens` are parts of them.
        """
