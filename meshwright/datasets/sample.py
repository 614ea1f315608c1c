"""One sample: tokens of equal number, cut from documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import NO_LOSS


@dataclass(frozen=True)
class Sample:
    """S + 1 tokens, of which each but the first is the label of the one before."""

    tokens: npt.NDArray[np.int64]
    has_loss: npt.NDArray[np.bool_]
    """Whether the loss counts the token, as a label."""
    documents: npt.NDArray[np.int32]
    """Which document of the sample a token belongs to: 0, 1, ..."""


def to_sample(pieces: Sequence[npt.NDArray[np.unsignedinteger]]) -> Sample:
    """Join pieces of documents, one after the other; ids may carry `NO_LOSS`."""
    joined = np.concatenate(pieces).astype(np.int64)
    documents = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(p) for p in pieces])
    return Sample(joined & ~NO_LOSS, (joined & NO_LOSS) == 0, documents)


def blank_sample(length: int) -> Sample:
    """A sample that the loss leaves out."""
    zeros = np.zeros(length, np.int64)
    return Sample(zeros, zeros.astype(np.bool_), zeros.astype(np.int32))
