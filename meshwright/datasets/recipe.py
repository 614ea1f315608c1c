"""A source, and everything that its tokens depend on: the recipe of a token cache or a stream."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from meshwright.datasets import identity
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.rows import Documents, IndexedDocuments, unreadable_now
from meshwright.datasets.sources import DatasetSpec, find_dataset
from meshwright.datasets.storage import DataFile
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer, find_template
from meshwright.datasets.tokenizers.special_tokens import OWN, Ends
from meshwright.system.errors import PASSED_ON, ConfigError, StorageError
from meshwright.system.files import may_pass
from meshwright.system.modules import code_of, describe_error, import_user_module

if TYPE_CHECKING:
    from meshwright.datasets.tokenizers.chat import ChatTemplate


@dataclass(frozen=True)
class TokenizationSpec:
    """Everything that the tokens of a source depend on."""

    entry: SourceEntry
    tokenizer_path: str
    chat_template_path: str = ""
    custom_import: str = ""
    """Module of the user's that may have the dataset: a process that tokenizes imports it anew."""
    ends: Ends = OWN
    """Tokens around a document that the config gives."""
    options: str = ""
    """[options.NAME] of the dataset, as JSON; "": the config has none."""

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
    def _own_options(self) -> list[BaseModel]:
        """The options of the user's dataset, if the module has a model of them."""
        models = getattr(import_user_module(self.custom_import), "OPTIONS", {})
        model = models.get(self.entry.source.dataset)
        return [model.model_validate_json(self.options or "{}")] if model else []

    @property
    def _spec(self) -> DatasetSpec:
        spec = self._own or find_dataset(self.entry.source.dataset)
        assert spec is not None  # `resolve` has looked
        return spec

    def open(self, streamed: bool) -> Documents | TokenFiles:
        """Return the documents.

        Raises:
            ConfigError: if the user's own function fails, or returns something else.
            StorageError: if its error may pass.
        """
        if (own := self._own) is None:
            return self._spec.open(self.entry, streamed)
        try:
            documents = own.open(self.entry, streamed, *self._own_options)
        except (ConfigError, StorageError, *PASSED_ON):
            raise
        except BaseException as error:
            what = describe_error(error, str(import_user_module(self.custom_import).__file__))
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
        return self._spec.is_of_hub and not self.entry.source.dataset_path

    @property
    def id(self) -> str:
        """Hash of the documents, the code that makes them, the tokenizer and the chat template: the
        name of the token cache."""
        documents = identity.hash_documents(self.entry, self.files, options=self.options)
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
