"""From documents to tokens."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from meshwright.datasets.conversations import Conversation, Document
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.datasets.tokenizers.special_tokens import NAME_KEY, PATH_KEY
from meshwright.system.errors import PASSED_ON, ConfigError, RecordError
from meshwright.system.modules import describe_error, file_of

if TYPE_CHECKING:
    from meshwright.datasets.tokenizers.chat import ChatTemplate

NO_LOSS = 1 << 31
"""Bit of a token that the loss leaves out, where it is the one to predict."""

Tokens = npt.NDArray[np.uint32]
T = TypeVar("T")


def loss_line(num_lost: int, num_characters: int) -> str:
    """Return a sentence on characters that the tokenizer has no token for; "" if there are none."""
    if not num_lost:
        return ""
    share = num_lost / num_characters
    return (
        f"the tokenizer has no token for {num_lost:,} of {num_characters:,} characters "
        f"({share:.2%}, white space left out): they vanish or become unknown tokens"
    )


class Encoder:
    """Documents to tokens: BOS text EOS, or a conversation by the chat template, unless the
    tokenizer encodes it by itself.

    Args:
        open_template: called if there is a conversation; it may raise that there is no template.
    """

    num_lost, num_characters = 0, 0
    """Characters of all text so far that have no token, and all of them; both without white space,
    and 0 where a tokenizer has a token for everything."""

    _logged_at = 0
    """`num_characters` when `new_loss_line` was last not empty."""

    def __init__(self, tokenizer: Tokenizer, open_template: "Callable[[], ChatTemplate]") -> None:
        self._tokenizer, self._open_template = tokenizer, open_template

    @functools.cached_property
    def _template(self) -> "ChatTemplate":
        return self._open_template()

    @property
    def unread(self) -> Counter[str]:
        """Messages that have a key, by its name, which the chat template doesn't read."""
        return self._template.unread if "_template" in vars(self) else Counter()

    def encode(self, document: Document) -> Tokens:
        """uint32 ids, some with `NO_LOSS`; none of an empty text, which is no document."""
        if isinstance(document, str):
            ids = self._of_text(self._tokenizer.encode, document) if document else []
            self._count_lost(document)
            whole = [*self._tokenizer.before, *ids, *self._tokenizer.after] if ids else []
            return np.array(whole, np.uint32)
        ids, counts = self._encode_conversation(document)
        self._count_lost(*document.texts)
        return np.where(counts, ids, np.bitwise_or(ids, NO_LOSS)).astype(np.uint32)

    def new_loss_line(self) -> str:
        """Return `loss_line` of the text so far; "" until ten times as many have been read as when
        it was last returned, so that a log of days has a few of them."""
        if not self.num_lost or self.num_characters < 10 * self._logged_at:
            return ""
        self._logged_at = self.num_characters
        return loss_line(self.num_lost, self.num_characters)

    def _count_lost(self, *texts: str) -> None:
        if self._tokenizer.loses_text:
            for text in texts:
                lost, characters = self._of_text(self._tokenizer.count_lost, text)
                self.num_lost += lost
                self.num_characters += characters

    def _of_text(self, function: Callable[[str], T], text: str) -> T:
        try:
            return function(text)
        except (ConfigError, MemoryError, *PASSED_ON):
            raise
        except BaseException as error:  # of the user's code; or a panic of Rust
            where = f"the tokenizer fails on a text that starts with {text[:40]!r}"
            is_ours = type(self._tokenizer).__module__.startswith("meshwright.")
            key = PATH_KEY if is_ours else NAME_KEY
            raise RecordError(key, f"{key}: {where}: {self._describe(error)}") from None

    def _encode_conversation(self, document: Conversation) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and for each whether loss counts on it."""
        own = getattr(self._tokenizer, "encode_conversation", None)
        if own is None:
            return self._template.encode(
                document.messages, document.place, tools=document.tools, options=document.options
            )
        try:
            ids, counts = own(document)
            if len(ids) != len(counts) or not any(counts):
                raise ValueError(f"gives {len(ids)} ids and {sum(counts)} that loss counts on")
        except (ConfigError, MemoryError, *PASSED_ON):
            raise
        except BaseException as error:
            what = f"{document.place}: the tokenizer's encode_conversation: {self._describe(error)}"
            raise RecordError(NAME_KEY, f"{NAME_KEY}: {what}") from None
        return ids, counts

    def _describe(self, error: BaseException) -> str:
        return describe_error(error, file_of(type(self._tokenizer)))
