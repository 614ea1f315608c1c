"""A parameter as data: its shape, use, initial values, and how ranks hold it. Free of torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Layout = Literal[
    "embedding",
    "colwise",
    "colwise_gathered",
    "rowwise",
    "on_sequence",
    "on_tokens",
    "on_heads",
    "over_heads",
    "heads",
    "experts",
    "output",
]
"""How tensor parallelism holds a parameter. A rank has its part of the sequence between the
modules of a block, and its part of the heads or of the FFN hidden size inside them.

    embedding: rows are sharded; the module takes whole sequences of tokens.
    colwise: rows (output features) are sharded; the module takes whole sequences.
    colwise_gathered: the same; the block has gathered the sequences before, as the input of several
        modules, and sums up its gradient over ranks.
    rowwise: columns (input features) are sharded; results are summed over ranks.
    on_sequence: whole; the module works on the rank's part of the sequence, (B, S/tp, D).
    on_tokens: whole; the module works on the rank's part of the sequence, (B S/tp, D).
    on_heads: whole; the module works on the rank's heads, (B, S, N/tp, H).
    over_heads: sharded as the heads, (B, S, N H/tp); the module is a norm over the heads of all
        ranks.
    heads: sharded as the heads, (N/tp,) or (N H/tp, taps); the module gives the values.
    experts: not sharded by tensor parallelism, whose ranks share in the experts as others do: the
        first dimension, one expert each, is sharded over the ep axis.
    output: rows are sharded, and so are the logits.
"""


@dataclass(frozen=True)
class Cut:
    """A layout of your own: tensor-parallel ranks have equal parts of a parameter along `dim`.

    The parameter belongs to a module inside of attention or of the feed-forward, which takes whole
    sequences. That module sees the rank's part of the parameter, as if there were no other, and its
    output is the rank's too: of its heads, or of its part of the FFN hidden size. A "rowwise" layer
    adds the parts up.
    """

    dim: int


Role = Literal["embedding", "output", "norm", "bias", "matrix", "experts", "taps"]
"""The use of a parameter. experts: matrices (E, R, C), one for each expert. taps: a short filter
of each channel, (W, taps)."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module."""

    shape: tuple[int, ...]
    layout: Layout | Cut
    std: float | None
    """Standard deviation of its initial values; None: they are one, or `quantile` gives them."""
    token_share: float = 1.0
    """Share of tokens that it multiplies as a matrix, above 1 if it multiplies each several times;
    0: a vector, or a table to look up in."""
    parts: tuple[str, int] | None = None
    """Key in `model.args` of the parts that can only be split apart whole, and their number."""
    alternates: bool = False
    """Its initial values are 1, -1, 1, ... instead of one."""
    lr_scale: float = 1.0
    """Factor on its learning rate. Weight decay, which that multiplies, is divided by it."""
    is_offset: bool = False
    """Its layer multiplies by 1 + w, so its initial values are less by one."""
    quantile: Callable[[float], float] | None = None
    """The initial values of a vector are this function of uniform numbers in (0, 1)."""
    heads: int = 1
    """Heads whose rows follow each other in a matrix. With `optimizer.muon.split_heads` each head's
    are a separate matrix."""

    @cached_property  # as the next: a search asks for them a million times
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @cached_property
    def role(self) -> Role | None:
        """Its use, if its shape and layout tell."""
        if self.layout == "embedding" or self.layout == "output":
            return self.layout
        vector: Role = "norm" if self.std is None and self.quantile is None else "bias"
        plane: Role = "matrix"
        if self.layout in ("experts", "heads"):
            plane = vector if self.layout == "experts" else "taps"
        by_dimensions: dict[int, Role] = {1: vector, 2: plane, 3: "experts"}
        return by_dimensions.get(len(self.shape))


def block_of(name: str) -> str:
    """Return the module of a parameter that a stage of a pipeline has whole: a layer, as
    "layers.3", "tok_embeddings", "norm" or "output"."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


@dataclass(frozen=True)
class State:
    """A tensor of a module that is no parameter, but part of a checkpoint: the same on every rank
    that has the module."""

    shape: tuple[int, ...]
    dtype: Literal["float32", "int64"]
    value: float
    """At the start, of every element."""
