"""Everything that a source's tokens depend on."""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime

from meshwright.datasets import find_dataset
from meshwright.datasets.conversations.chat import ChatTemplate, find_template
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.entry import Entry
from meshwright.datasets.sources import Documents, fingerprint, sampled
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.errors import ConfigError

TODAY = datetime(2024, 7, 26)
"""For chat templates that write the date (it is the one that Llama 3.1's falls back to): the same
conversation has to be the same tokens tomorrow."""
FORMAT = 1
"""Of the files; another number is another cache."""


@dataclass(frozen=True)
class Recipe:
    """Everything that the tokens of a source depend on."""

    entry: Entry
    tokenizer_path: str
    chat_template_path: str = ""

    def open(self, streamed: bool) -> Documents:
        """The documents."""
        spec = find_dataset(self.entry.source.dataset)
        assert spec is not None  # preflight has looked
        return spec.open(self.entry, streamed)

    def encoder(self) -> Encoder:
        """The encoder of its documents."""
        tokenizer = build_tokenizer(self.tokenizer_path)

        def open_template() -> ChatTemplate:
            template = find_template(self.tokenizer_path, self.chat_template_path)
            return ChatTemplate(tokenizer, template, now=TODAY)

        return Encoder(tokenizer, open_template)

    def outline(self) -> str:
        """Hash of the facts known about the documents without reading them, on any machine."""
        spec = find_dataset(self.entry.source.dataset)
        assert spec is not None
        return fingerprint(self.entry, spec.files(self.entry), is_portable=True)

    def sampled(self) -> str:
        """Hash of a little of the documents' content, for files that differ in nothing else."""
        spec = find_dataset(self.entry.source.dataset)
        assert spec is not None
        return sampled(spec.files(self.entry))

    def identity(self) -> str:
        """Hash of the documents, the tokenizer and the chat template."""
        spec = find_dataset(self.entry.source.dataset)
        assert spec is not None
        tokenizer = build_tokenizer(self.tokenizer_path)
        try:
            template = find_template(self.tokenizer_path, self.chat_template_path)
        except ConfigError:  # it matters only if there are conversations, and is raised then
            template = ""
        parts = [
            FORMAT,
            fingerprint(self.entry, spec.files(self.entry)),
            tokenizer.fingerprint,
            tokenizer.bos_id,
            tokenizer.eos_id,
            template,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
