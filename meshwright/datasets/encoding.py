"""From documents to tokens, and everything that the tokens depend on."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from meshwright.datasets import identity
from meshwright.datasets.conversations import Document
from meshwright.datasets.files import Entry
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.rows import Documents, IndexedDocuments, unreadable_now
from meshwright.datasets.sources import DatasetSpec, find_dataset
from meshwright.datasets.storage import DataFile
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer, find_template
from meshwright.datasets.tokenizers.special_tokens import OWN, PATH_KEY, Ends
from meshwright.system.errors import PASSED_ON, ConfigError, RecordError, StorageError
from meshwright.system.files import may_pass
from meshwright.system.modules import code_of, import_user_module, in_words

if TYPE_CHECKING:
    from meshwright.datasets.tokenizers.chat import ChatTemplate

NO_LOSS = 1 << 31
"""Bit of a token that the loss leaves out, where it is the one to predict."""

Tokens = npt.NDArray[np.uint32]


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
    """Documents to tokens: BOS text EOS, or a conversation by the chat template.

    Args:
        open_template: called if there is a conversation; it may raise that there is no template.
    """

    num_lost, num_characters = 0, 0
    """Characters of all texts so far that have no token, and all of them; both without white space,
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
        """Messages that have a key, by its name, which the chat template does not read."""
        return self._template.unread if "_template" in vars(self) else Counter()

    def encode(self, document: Document) -> Tokens:
        """uint32 ids, some with `NO_LOSS`; none of an empty text, which is no document."""
        if isinstance(document, str):
            ids = self._encode_text(document) if document else []
            self._count_lost(document)
            whole = [*self._tokenizer.before, *ids, *self._tokenizer.after] if ids else []
            return np.array(whole, np.uint32)
        ids, counts = self._template.encode(
            document.messages, document.place, tools=document.tools, options=document.options
        )
        self._count_lost(*document.texts)
        return np.where(counts, ids, np.bitwise_or(ids, NO_LOSS)).astype(np.uint32)

    def new_loss_line(self) -> str:
        """Return `loss_line` of the texts so far; "" until ten times as many have been read as when
        it was last returned, so that a log of days has a few of them."""
        if not self.num_lost or self.num_characters < 10 * self._logged_at:
            return ""
        self._logged_at = self.num_characters
        return loss_line(self.num_lost, self.num_characters)

    def _count_lost(self, *texts: str) -> None:
        if self._tokenizer.loses_text:
            for lost, characters in map(self._tokenizer.count_lost, texts):
                self.num_lost += lost
                self.num_characters += characters

    def _encode_text(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except (Exception, *PASSED_ON):
            raise
        except BaseException as panic:  # of Rust: a worker could not even hand it on
            where = f"the tokenizer fails on a text that begins with {text[:40]!r}"
            what = f"{PATH_KEY}: {where}: {type(panic).__name__}: {panic}"
            raise RecordError(PATH_KEY, what) from None


@dataclass(frozen=True)
class TokenizationSpec:
    """Everything that the tokens of a source depend on."""

    entry: Entry
    tokenizer_path: str
    chat_template_path: str = ""
    custom_import: str = ""
    """Module of the user's that may have the dataset: a process that tokenises imports it anew."""
    ends: Ends = OWN
    """Tokens around a document that the config names."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; it is built once in a process."""
        return build_tokenizer(self.tokenizer_path, self.ends)

    @property
    def _own(self) -> DatasetSpec | None:
        """The dataset, if it is from the user's module."""
        module = import_user_module(self.custom_import) if self.custom_import else None
        datasets: Mapping[str, DatasetSpec] = getattr(module, "DATASETS", {})
        return datasets.get(self.entry.source.dataset)

    @property
    def _spec(self) -> DatasetSpec:
        found = self._own or find_dataset(self.entry.source.dataset)
        assert found is not None  # `resolve` has looked
        return found

    def open(self, streamed: bool) -> Documents | TokenFiles:
        """Return the documents.

        Raises:
            ConfigError: if the user's own function fails, or returns something else.
            StorageError: if its error may pass.
        """
        if (own := self._own) is None:
            return self._spec.open(self.entry, streamed)
        try:
            documents = own.open(self.entry, streamed)
        except (ConfigError, StorageError, *PASSED_ON):
            raise
        except BaseException as error:
            what = in_words(error, str(import_user_module(self.custom_import).__file__))
            if may_pass(error):
                raise unreadable_now(self.entry, "dataset", what) from error
            raise self.entry.error("dataset", f"cannot be opened: {what}") from error
        if not (own.has_tokens or isinstance(documents, Documents)):
            rule = f"its function returns {type(documents).__name__}, and no documents"
            raise self.entry.error("dataset", rule, "return IndexedDocuments(size, get)")
        if isinstance(documents, IndexedDocuments):
            documents.name = self.entry.name
        return documents

    def encoder(self) -> Encoder:
        """Return the encoder of its documents."""
        tokenizer = self.tokenizer

        def open_template() -> "ChatTemplate":
            # not at import: it needs jinja2, and few jobs have conversations
            from meshwright.datasets.tokenizers.chat import ChatTemplate

            template = find_template(self.tokenizer_path, self.chat_template_path)
            return ChatTemplate(tokenizer, template)

        return Encoder(tokenizer, open_template)

    @functools.cached_property
    def files(self) -> list[DataFile]:
        """The files of the source, as they are when it is asked for first: a walk over folders, or
        requests to the Hub."""
        return self._spec.find(self.entry)

    @property
    def is_of_hub(self) -> bool:
        """Whether its files are addresses of the Hub."""
        return self._spec.path == "optional" and not self.entry.source.dataset_path

    @property
    def id(self) -> str:
        """Hash of the documents, the code that makes them, the tokenizer and the chat template: the
        name of the token cache."""
        documents = identity.hash_documents(self.entry, self.files)
        return identity.short_hash([identity.CACHE_FORMAT, documents, *self._encoding])

    @property
    def encoding_hash(self) -> str:
        """Hash of the same without the documents."""
        return identity.short_hash(self._encoding)

    @property
    def _encoding(self) -> list[object]:
        paths = self.tokenizer_path, self.chat_template_path
        parts = identity.tokenizer_parts(self.tokenizer, *paths)
        if identity.find_any_template(*paths):
            parts.append(identity.CHATS_VERSION)  # there may be conversations
        code = code_of(self.custom_import) if self._own else ""
        return [*parts, code] if code else parts
