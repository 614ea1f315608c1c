"""The data of a job: one process looks for it and tokenizes it; the others open it by what that one
knows of each source, and look for nothing."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from meshwright.config.job_config import JobConfig
from meshwright.datasets import identity
from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.data_file import DataFile, is_address
from meshwright.datasets.files import ROW_FORMATS, SourceEntry
from meshwright.datasets.identity import SourceFacts
from meshwright.datasets.named_sources import entries, is_streamed, validation_entries, with_options
from meshwright.datasets.packing import open_packing
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.rows import Documents, LocalDocuments, unreadable
from meshwright.datasets.shards import StreamedSource, check_shards
from meshwright.datasets.sources import StreamedRows
from meshwright.datasets.stream import OpenSource
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.tokenizing import cache_root, open_cache
from meshwright.datasets.token_parts import DamagedCacheError
from meshwright.datasets.tokenizers.special_tokens import tokenizer_keys
from meshwright.system.log import logger

Table = Literal["training", "validation"]

TABLES: tuple[Table, ...] = ("training", "validation")


Facts = Mapping[Table, Sequence[SourceFacts]]


def find_data(config: JobConfig) -> Facts:
    """Open both tables on one process, which tokenizes whatever is to be cached and isn't yet, and
    return by what the others open them.

    Raises:
        ConfigError: as `open_data`.
    """
    return {table: [source.facts for source in open_data(table, config)] for table in TABLES}


def open_data(
    table: Table,
    config: JobConfig,
    facts: Facts | None = None,
    *,
    num_workers: int = 0,
    check_all: bool = False,
    looks_at_files: bool = False,
) -> list[OpenSource]:
    """Open the data of a table, none if the job isn't validated.

    Args:
        facts: from `find_data`; None: no other process has called it, and this one finds the data.
        num_workers: processes that tokenize; 0: one a core.
        check_all: look at every byte of caches now, not when it is read.
        looks_at_files: look whether the files have the same content on this node as where they were
            found. One process of each node does.

    Raises:
        ConfigError: if something can't be read, or holds fewer samples than it is to give.
    """
    opening = Opening(config, table, num_workers, check_all, looks_at_files)
    named = entries_of(table, config)
    of_each = [None] * len(named) if facts is None else facts[table]
    return [opening.open(entry, known) for entry, known in zip(named, of_each, strict=True)]


def entries_of(table: Table, config: JobConfig) -> list[SourceEntry]:
    """Return the sources of a table; of validation none, if the job isn't validated."""
    if table == "training":
        return entries(config.training, table)
    return validation_entries(config)


def recipe_of(entry: SourceEntry, config: JobConfig) -> TokenizationSpec:
    """Return everything that the tokens of a source depend on."""
    model, sections = config.model, {"model", "options"}
    return TokenizationSpec(
        with_options(entry, config),
        model.tokenizer_path,
        model.chat_template_path,
        config.experimental.custom_import,
        tokenizer_keys(config.model_dump(mode="json", include=sections)),
    )


@dataclass(frozen=True)
class Opening:
    """How one process finds and opens the sources of a table."""

    config: JobConfig
    table: Table
    num_workers: int = 0
    check_all: bool = False
    looks_at_files: bool = False

    def open(self, entry: SourceEntry, known: SourceFacts | None) -> OpenSource:
        """Open a source by what another process knows of it; None: look for it, and tokenize and
        pack it, unless it is streamed or that is done."""
        recipe = recipe_of(entry, self.config)
        if is_streamed(entry):
            return self._open_stream(recipe, known)
        return self._open_cached(recipe, known)

    def _open_cached(self, recipe: TokenizationSpec, known: SourceFacts | None) -> CachedSource:
        cache = None
        if known is not None:
            with suppress(DamagedCacheError, OSError):  # this node has its own files and caches
                cache = TokenCache(
                    self._cache_root / known.cache,
                    looks_at_parts=self.looks_at_files,
                    blocks=self._blocks,
                )
        if cache is None:
            cache = self._tokenize(recipe)
        packing = None
        if self._is_packed:
            packing = open_packing(cache, self._length, again=self.check_all)
        if known is None:
            if packing is not None:
                logger.info(
                    "%s: its documents fill %s sequences, with %.3g %% padding",
                    recipe.entry.name,
                    f"{packing.num_samples:,}",
                    100 * (1 - cache.num_tokens / (packing.num_samples * self._length)),
                )
            commit = identity.commit_of(recipe.files) if recipe.is_of_hub else ""
            known = SourceFacts(commit, cache.folder.name)
        return CachedSource(recipe.entry, cache, known, packing)

    @property
    def _length(self) -> int:
        """Tokens of a sample."""
        return self.config.training.seq_len + 1

    @property
    def _is_packed(self) -> bool:
        return self.table == "training" and self.config.training.packing != "cut"

    @property
    def _cache_root(self) -> Path:
        return cache_root(self.config.training.token_cache_folder)

    @property
    def _blocks(self) -> BlockCache:
        limit = int(self.config.training.block_cache_gib * (1 << 30))
        return BlockCache(self._cache_root / "blocks", limit)

    def _tokenize(self, recipe: TokenizationSpec) -> TokenCache:
        """Open the cache of a source, which is made first if need be.

        Raises:
            ConfigError: if it holds fewer samples than it is to give.
        """
        cache = open_cache(
            recipe,
            self._cache_root,
            num_workers=self.num_workers,
            check_all=self.check_all,
            max_bad_records=self.config.training.max_bad_records,
            blocks=self._blocks,
        )
        needed, keys = 1, "training.seq_len"
        if self.table == "validation" and self.config.validation.num_samples > 1:
            needed, keys = self.config.validation.num_samples, f"{keys} or validation.num_samples"
        samples = cache.num_tokens // self._length
        if samples < needed:
            tokens = f"its {cache.num_tokens:,} tokens give {samples} samples of {self._length}"
            rule, fix = f"{tokens}, and {needed} are needed", f"add data, or lower {keys}"
            raise recipe.entry.error("dataset", rule, fix)
        return cache

    def _open_stream(self, recipe: TokenizationSpec, known: SourceFacts | None) -> StreamedSource:
        if known is None:
            known = self._find_stream(recipe)
        elif recipe.entry.source.dataset in ROW_FORMATS:
            path = known.files[0].path
            if not (is_address(path) or os.path.exists(path)):  # this node has a copy elsewhere
                known = self._find_stream(recipe)
            elif self.looks_at_files:
                known = replace(known, documents=_hash(recipe, known.files))
        return self._stream(recipe, known)

    def _find_stream(self, recipe: TokenizationSpec) -> SourceFacts:
        documents = _hash(recipe, recipe.files)
        if not recipe.is_of_hub:
            facts = SourceFacts(documents=documents, files=recipe.files)
            # a validation reads as many shards as its samples need
            is_training = self.table != "validation"
            if is_training and not any(is_address(file.path) for file in recipe.files):
                check_shards(self._stream(recipe, facts), self._length)
            return facts
        opened, commit = recipe.open(streamed=True), identity.commit_of(recipe.files)
        rows = opened.rows if isinstance(opened, StreamedRows) else None
        return SourceFacts(commit, documents=documents, rows=rows)

    def _stream(self, recipe: TokenizationSpec, facts: SourceFacts) -> StreamedSource:
        entry, training = recipe.entry, self.config.training
        documents: Documents
        if facts.rows is not None:
            documents = StreamedRows(facts.rows, entry)
        elif entry.source.dataset in ROW_FORMATS:
            documents = LocalDocuments(entry, facts.files)
        else:
            opened = recipe.open(streamed=True)
            assert isinstance(opened, Documents)  # `check_path` has rejected files of tokens
            documents = opened
        most = entry.source.max_documents or training.stream_shards
        shards = min(training.stream_shards, documents.max_shards, most)
        window = training.shuffle_window
        return StreamedSource(entry, documents, recipe.encoder(), shards, window, facts)


def _hash(recipe: TokenizationSpec, files: Sequence[DataFile]) -> str:
    """Return the hash of a stream of these files."""
    try:
        some = identity.hash_some_bytes(files)
    except OSError as error:
        raise unreadable(recipe.entry, error) from error
    documents = identity.hash_documents(recipe.entry, files, is_portable=True)
    return f"{documents}, {some}, {recipe.encoding_hash}"
