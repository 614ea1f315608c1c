"""One sample: tokens of equal number, cut from documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.datasets.rows import Document, Messages
from meshwright.datasets.tokenizers.kinds import PATH_KEY, Tokenizer
from meshwright.system.errors import PASSED_ON, RecordError

NO_LOSS = 1 << 31
"""Bit of a token that the loss leaves out, where it is the one to predict."""

Tokens = npt.NDArray[np.uint32]


class Conversation(Protocol):
    """Makes tokens of conversations."""

    def encode(self, messages: Messages, where: str) -> tuple[list[int], list[bool]]:
        """Return the ids, special ones included; and whether the loss counts each. `where` is for
        errors."""


class Encoder:
    """Documents to tokens: BOS text EOS, or a conversation by the chat template.

    Args:
        open_template: called if there is a conversation; it may raise that there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, open_template: Callable[[], Conversation]) -> None:
        self._tokenizer, self._open_template = tokenizer, open_template
        self._template: Conversation | None = None
        self._before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self._after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode(self, document: Document) -> Tokens:
        """uint32 ids, some with `NO_LOSS`; none of an empty text, which is no document."""
        if isinstance(document, str):
            ids = self._encode_text(document) if document else []
            return np.array([*self._before, *ids, *self._after] if ids else [], np.uint32)
        if self._template is None:
            self._template = self._open_template()
        begins = repr(document[0]["content"][:40]) if document else "empty"
        ids, counts = self._template.encode(document, begins)
        return np.where(counts, ids, np.bitwise_or(ids, NO_LOSS)).astype(np.uint32)

    def _encode_text(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except (Exception, *PASSED_ON):
            raise
        except BaseException as panic:  # of Rust: a worker could not even hand it on
            where = f"the tokenizer fails on a text that begins with {text[:40]!r}"
            what = f"{PATH_KEY}: {where}: {type(panic).__name__}: {panic}"
            raise RecordError(PATH_KEY, what) from None


Raw = npt.NDArray[np.unsignedinteger]
"""Ids as they are kept: of 16 bits, or of 32 of which `NO_LOSS` is one."""


@dataclass(frozen=True)
class Sample:
    """S + 1 tokens, of which each but the first is the label of the one before."""

    raw: Raw
    lengths: list[int]
    """Of the pieces of documents that it is made of; the padding counts as one."""
    padding: int = 0
    """Tokens at its end that are of no document."""

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


def to_sample(pieces: Sequence[Raw], *, padded_to: int = 0) -> Sample:
    """Join pieces of documents, one after the other.

    Args:
        padded_to: tokens that the sample has at least; the loss leaves out the padding.
    """
    lengths = [len(piece) for piece in pieces]
    padding = max(padded_to - sum(lengths), 0)
    if padding:
        pieces, lengths = [*pieces, blank_sample(padding).raw], [*lengths, padding]
    return Sample(np.concatenate(pieces), lengths, padding)


def blank_sample(length: int) -> Sample:
    """Return a sample that the loss leaves out."""
    return Sample(np.full(length, NO_LOSS, np.uint32), [length])
