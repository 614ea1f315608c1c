"""Sources that tests make up: no files, no library of Hugging Face."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from meshwright.config.section import BYTES
from meshwright.config.training import Source
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.conversations import Message
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.rows import Document, IndexedDocuments, Item
from meshwright.datasets.shards import StreamedSource
from meshwright.datasets.stream import OpenSource
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import ByteTokenizer

BOS, EOS = 256, 257
OWN_DATASET = """
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.sources import DatasetSpec

DATASETS = {{"own": DatasetSpec(lambda *_: IndexedDocuments(1, lambda _: {!r}), lambda _: [])}}
"""

# of every length around that of a sample, one of many samples, one without text
TEXTS = ("a", "bc", "defghij", "k" * 57, "", "lmnop", "qrst", "uvwxyz" * 3, "ABCDEFGHI")
LENGTH = 8


def entry(name: str = "data", **keys: object) -> SourceEntry:
    """Of the data of training, with these keys; without a kind, its name is one."""
    return SourceEntry("training", name, Source(**{"dataset": name} | keys))


def tokenization(**keys: object) -> TokenizationSpec:
    """By bytes, of a source with these keys."""
    return TokenizationSpec(entry(**keys), BYTES)


def encode(text: str) -> list[int]:
    return [BOS, *text.encode(), EOS] if text else []


class Turns:
    """In place of a chat template: contents one after the other; the assistant's have loss."""

    unread: ClassVar = Counter[str]()

    def encode(
        self, messages: list[Message], where: str, **others: object
    ) -> tuple[list[int], list[bool]]:
        tokens = [
            (byte, turn["role"] == "assistant")
            for turn in messages
            for byte in turn["content"].encode()
        ]
        return [token for token, _ in tokens], [counts for _, counts in tokens]


@dataclass(frozen=True, eq=False)  # hashed by identity: documents may be lists
class TextsRecipe:
    """In place of a `TokenizationSpec`: the texts themselves, as bytes."""

    texts: tuple[Document, ...] = TEXTS
    name: str = "texts"
    tokenizer_path: str = BYTES
    opened_note: str = ""
    """File that grows by a line whenever the documents are opened."""

    @property
    def entry(self) -> SourceEntry:
        return entry(self.name)

    def open(self, streamed: bool) -> IndexedDocuments:
        if self.opened_note:
            with open(self.opened_note, "a") as file:
                file.write(f"{os.getpid()}\n")
        return IndexedDocuments(len(self.texts), self.texts.__getitem__)

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def encoder(self) -> Encoder:
        return Encoder(ByteTokenizer(), Turns)

    @property
    def id(self) -> str:
        return hashlib.sha256(repr(self.texts).encode()).hexdigest()[:16]


def cached(folder: Path, texts: tuple[str, ...] = TEXTS, name: str = "texts") -> CachedSource:
    recipe = TextsRecipe(texts, name)
    return CachedSource(recipe.entry, open_cache(recipe, folder, num_workers=1))


def streamed(
    texts: tuple[str, ...] = TEXTS,
    num_shards: int = 3,
    window: int = 2,
    name: str = "stream",
    get: Callable[[int], Item] | None = None,
) -> StreamedSource:
    documents = IndexedDocuments(len(texts), get or texts.__getitem__)
    encoder = Encoder(ByteTokenizer(), Turns)
    return StreamedSource(entry(name), documents, encoder, num_shards, window)


def weighted(sources: Sequence[OpenSource], weights: Sequence[float]) -> list[OpenSource]:
    """The sources as parts of a mixture with these weights."""
    pairs = zip(sources, weights, strict=True)
    return [replace(source, entry=replace(source.entry, weight=w)) for source, w in pairs]
