"""One sample: tokens of equal number, cut from documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import NO_LOSS

Raw = npt.NDArray[np.unsignedinteger]
"""Ids as they are kept: of 16 bits, or of 32 of which `NO_LOSS` is one."""


@dataclass(frozen=True)
class Sample:
    """S + 1 tokens, of which each but the first is the label of the one before."""

    raw: Raw
    lengths: list[int]
    """Of the pieces of documents that it is made of."""

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Ids."""
        return self.raw.astype(np.int64) & ~NO_LOSS

    @property
    def has_loss(self) -> npt.NDArray[np.bool_]:
        """Whether the loss counts the token, as a label."""
        return self.raw.astype(np.int64) & NO_LOSS == 0

    @property
    def documents(self) -> npt.NDArray[np.int32]:
        """Which document of the sample a token belongs to: 0, 1, ..."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)


@dataclass(frozen=True)
class SampleRules:
    """How samples are made of sources: the same for all sources of a job, and on all ranks."""

    length: int
    """Tokens of a sample."""
    seed: int | None
    """Of every shuffle; None: samples of caches come in the order in which they lie."""
    max_epochs: int = 0
    """Times that a source may be read; 0: no limit."""
    max_bad_records: int = 0
    """Records of streamed sources that may be passed over, in all shards that are read here."""


def to_sample(pieces: Sequence[Raw]) -> Sample:
    """Join pieces of documents, one after the other."""
    return Sample(np.concatenate(pieces), [len(piece) for piece in pieces])


def blank_sample(length: int) -> Sample:
    """Return a sample that the loss leaves out."""
    return Sample(np.full(length, NO_LOSS, np.uint32), [length])
