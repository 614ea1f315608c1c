"""A document as it lies in the stream of tokens."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.datasets.entry import Document, Messages
from meshwright.datasets.tokenizers.kinds import PATH_KEY, Tokenizer
from meshwright.errors import PASSED_ON, RecordError

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
