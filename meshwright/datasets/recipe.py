"""A source, and everything that its tokens depend on: the recipe of a token cache or a stream."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.config.own_options import OPTIONS, options_of
from meshwright.datasets import identity
from meshwright.datasets.conversations import FORMATS
from meshwright.datasets.data_file import DataFile, is_address
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.rows import Documents, IndexedDocuments, unreadable_now
from meshwright.datasets.sources import DATASETS, DatasetSpec, find_dataset
from meshwright.datasets.tokenizers.kinds import (
    TOKENIZERS,
    Tokenizer,
    build_tokenizer,
    find_template,
)
from meshwright.datasets.tokenizers.special_tokens import OWN, TokenizerKeys
from meshwright.system.errors import (
    FIX,
    PASSED_ON,
    ConfigError,
    RecordError,
    StorageError,
    where_it_ends,
)
from meshwright.system.modules import code_of, describe_error, import_user_module
from meshwright.system.retries import may_pass

if TYPE_CHECKING:
    from meshwright.datasets.tokenizers.chat import ChatTemplate

OWN_TABLES: dict[str, dict[str, Any]] = {
    "DATASETS": DATASETS,
    "FORMATS": FORMATS,
    "TOKENIZERS": TOKENIZERS,
    "OPTIONS": OPTIONS,
}
"""Tables of a user's module that tokenizing needs, and ours that they extend."""


@dataclass(frozen=True)
class TokenizationSpec:
    """Everything that the tokens of a source depend on."""

    entry: SourceEntry
    tokenizer_path: str
    chat_template_path: str = ""
    custom_import: str = ""
    """Module of the user's that may have the dataset, its format or the tokenizer."""
    keys: TokenizerKeys = OWN
    """What else the config says of the tokenizer."""

    def _take_over(self) -> None:
        """Add what the user's module has to the tables: a process that tokenizes starts without."""
        for table, known in OWN_TABLES.items():
            known.update(self._own(table))

    def _own(self, table: str) -> Mapping[str, Any]:
        """Return a table of the user's module."""
        module = import_user_module(self.custom_import) if self.custom_import else None
        return getattr(module, table, {})

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; of a file, it is built once in a process."""
        self._take_over()
        return build_tokenizer(self.tokenizer_path, self.keys)

    @property
    def _spec(self) -> DatasetSpec:
        self._take_over()
        spec = find_dataset(self.entry.source.dataset)
        assert spec is not None  # `resolve` has looked
        return spec

    def open(self, streamed: bool) -> Documents | TokenFiles:
        """Return the documents.

        Raises:
            ConfigError: if the user's own function fails, or returns something else.
            StorageError: if its error may pass.
        """
        spec, name = self._spec, self.entry.source.dataset
        if name not in self._own("DATASETS"):
            return spec.open(self.entry, streamed)
        opens: Callable[..., Any] = spec.open
        options = options_of(name, self.entry.options)
        arguments = [self.entry, streamed] if options is None else [self.entry, streamed, options]
        try:
            documents = opens(*arguments)
        except (ConfigError, StorageError, *PASSED_ON):
            raise
        except BaseException as error:
            what = describe_error(error, str(import_user_module(self.custom_import).__file__))
            if may_pass(error):
                raise unreadable_now(self.entry, "dataset", what) from error
            fix = "correct it; docs/extending.md has an example"
            raise self.entry.error("dataset", f"cannot be opened: {what}", fix) from error
        if not (spec.has_tokens or isinstance(documents, Documents)):
            rule = f"its function returns {type(documents).__name__}, and no documents"
            raise self.entry.error("dataset", rule, "return IndexedDocuments(size, get)")
        if isinstance(documents, IndexedDocuments):
            documents.name = self.entry.name
        return documents

    def try_own(self, *, streamed: bool, reads: bool) -> None:
        """Open a dataset of the user's module before a job starts: ours have their own checks.

        Args:
            reads: its first document, too.

        Raises:
            ConfigError: if a file isn't there, or the user's function fails, or returns something
                else.
            StorageError: if its error may pass.
        """
        if self._spec.path == "required" and not self.entry.source.dataset_path:
            return  # `check_path` says so
        for file in self.files:
            if not (is_address(file.path) or os.path.exists(file.path)):
                is_given = file.path == self.entry.source.dataset_path
                rule = "no such file or folder" if is_given else f"no such file: {file.path}"
                key = "dataset_path" if is_given else "dataset"
                raise self.entry.error(key, rule, where_it_ends(file.path))
        documents = self.open(streamed)
        if reads and isinstance(documents, Documents):
            first = next(iter(documents.read(0, 1)), None)
            if isinstance(first, RecordError):
                fix = "correct it, or set training.max_bad_records to pass over such records"
                raise RecordError(first.key, f"{first}{FIX}{fix}")

    def encoder(self) -> Encoder:
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
        return self._spec.is_of_hub and not self.entry.source.dataset_path

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
        source = self.entry.source
        of_module = (
            ("DATASETS", source.dataset),
            ("FORMATS", source.dataset_format),
            ("TOKENIZERS", self.keys.name),
        )
        is_own = any(name in self._own(table) for table, name in of_module)
        code = code_of(self.custom_import) if is_own else ""
        parts += [self.keys.options] if self.keys.options else []
        return [*parts, code] if code else parts
