"""The sources that a config names, opened."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from meshwright.config.job_config import JobConfig
from meshwright.datasets.encoding import Encoder, TokenizationSpec
from meshwright.datasets.files import ROW_FORMATS, Entry, fingerprint, revision, sampled
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.named_sources import entries, is_streamed, validation_entries
from meshwright.datasets.rows import Documents, LocalDocuments, unreadable
from meshwright.datasets.samples import (
    CachedSamples,
    PackedSamples,
    Packing,
    SampleRules,
    open_packing,
)
from meshwright.datasets.sources import StreamedRows
from meshwright.datasets.storage import BlockCache, DataFile, is_address
from meshwright.datasets.token_cache.cache import DamagedCacheError, TokenCache
from meshwright.datasets.token_cache.tokenizing import cache_root, open_cache
from meshwright.datasets.tokenizers.special_tokens import Ends
from meshwright.system.log import logger


@dataclass(frozen=True)
class Found:
    """The facts of a source that one process of a job finds, and tells the others: they look for
    nothing."""

    revision: str = ""
    """Commit of a dataset of the hub."""
    cache: str = ""
    """Name of its token cache; "": it is streamed, and has the following."""
    content: str = ""
    """Hashes of its settings with the names and sizes of its files; of a little of their content;
    and of the user's code, the tokenizer and the chat template that make its tokens."""
    files: Sequence[DataFile] = ()
    """As they were when the job looked for them."""
    rows: Any = None
    """Of a stream of the hub, its `IterableDataset`: it knows the addresses of its files."""


@dataclass(frozen=True)
class CachedSource:
    """Any sample of it can be read."""

    entry: Entry
    cache: TokenCache
    found: Found = Found()
    packing: Packing | None = None
    """None: documents are cut."""

    @property
    def content(self) -> str:
        """Equal where all its samples are."""
        return self.cache.content

    def samples_per_epoch(self, length: int) -> int:
        """Return how many samples of `length` tokens an epoch has; length includes the label."""
        return self.samples(SampleRules(length, seed=None)).samples_per_epoch

    def samples(self, rules: SampleRules) -> CachedSamples:
        """Return its samples, packed if it is."""
        if self.packing is not None:
            return PackedSamples(self.cache, self.packing, rules.seed)
        return CachedSamples(self.cache, rules.length, rules.seed)


@dataclass(frozen=True)
class StreamedSource:
    """Its samples come in the order of its shards."""

    entry: Entry
    documents: Documents
    encoder: Encoder
    num_shards: int
    window: int
    """Documents that are shuffled together."""
    found: Found = Found()

    @property
    def unused(self) -> set[str]:
        """Columns of rows, and keys of messages, that have been read so far and are not used."""
        return {*self.documents.unused, *self.encoder.unread}

    @property
    def content(self) -> str:
        """The facts known without reading all of it."""
        shards = f"{self.num_shards} shards, {self.window} documents a window"
        return f"{shards}, {self.found.content}"


OpenSource = CachedSource | StreamedSource


def open_data(
    table: Literal["training", "validation"],
    config: JobConfig,
    told: Sequence[Found] = (),
    *,
    num_workers: int = 0,
    check_all: bool = False,
    is_first_here: bool = False,
) -> list[OpenSource]:
    """Open the data of a table, none if the job is not validated; first tokenise sources that are
    to be cached and are not yet.

    Args:
        told: the facts of each source, if another process of the job has found them.
        num_workers: processes that tokenise; 0: one a core.
        check_all: look at every byte of caches now, not when it is read.
        is_first_here: of data that was told, this process looks for its machine whether the files
            have the same content.

    Raises:
        ConfigError: if something cannot be read, or holds fewer samples than it is to give.
    """
    is_trained = table == "training"
    named = entries(config.training, table) if is_trained else validation_entries(config)
    needed = 1 if is_trained else max(config.validation.num_samples, 1)
    how = config, needed, num_workers, check_all, is_first_here
    sources = [_open(entry, one, *how) for entry, one in zip_longest(named, told)]
    if not is_trained or config.training.packing == "cut":
        return sources
    length = config.training.seq_len + 1
    return [_packed(source, length, again=check_all) for source in sources]


def _packed(source: OpenSource, length: int, *, again: bool) -> OpenSource:
    assert isinstance(source, CachedSource)  # `resolve` has refused it
    source = replace(source, packing=open_packing(source.cache, length, again=again))
    samples = source.samples_per_epoch(length)
    logger.info(
        "%s: its documents fill %s sequences, with %.3g %% padding",
        *(source.entry.name, f"{samples:,}"),
        100 * (1 - source.cache.num_tokens / (samples * length)),
    )
    return source


def recipe_of(entry: Entry, config: JobConfig) -> TokenizationSpec:
    """Return everything that the tokens of a source depend on."""
    model = config.model
    return TokenizationSpec(
        entry,
        model.tokenizer_path,
        model.chat_template_path,
        config.experimental.custom_import,
        Ends(model.bos_token, model.eos_token),
    )


def _open(
    entry: Entry,
    told: Found | None,
    config: JobConfig,
    needed: int,
    num_workers: int,
    check_all: bool,
    is_first_here: bool,
) -> OpenSource:
    recipe, length = recipe_of(entry, config), config.training.seq_len + 1
    if is_streamed(entry):
        found, documents = _documents(recipe, told, is_first_here)
        shards, most = config.training.stream_shards, entry.source.max_documents
        num_shards = min(shards, documents.max_shards, most or shards)
        window = config.training.shuffle_window
        return StreamedSource(entry, documents, recipe.encoder(), num_shards, window, found)
    root = cache_root(config.training.token_cache_folder)
    blocks = BlockCache(root / "blocks", int(config.training.block_cache_gib * (1 << 30)))
    if told is not None:
        with suppress(DamagedCacheError, OSError):  # this machine has caches of its own
            cache = TokenCache(root / told.cache, looks_at_parts=is_first_here, blocks=blocks)
            return CachedSource(entry, cache, told)
    cache = open_cache(
        recipe,
        root,
        num_workers=num_workers,
        check_all=check_all,
        max_bad_records=config.training.max_bad_records,
        blocks=blocks,
    )
    if (samples := cache.num_tokens // length) < needed:
        key = " or validation.num_samples" * (needed > 1)
        what = f"its {cache.num_tokens:,} tokens give {samples} samples of {length}"
        fix = f"add data, or lower training.seq_len{key}"
        raise entry.error("dataset", f"{what}, and {needed} are needed", fix)
    commit = revision(recipe.files()) if recipe.is_of_hub else ""
    return CachedSource(entry, cache, Found(commit, cache.folder.name))


def _documents(
    recipe: TokenizationSpec, told: Found | None, is_first_here: bool
) -> tuple[Found, Documents]:
    """Open the documents of a source that is streamed, of the files that the job was told of if
    they are here, too: this machine may have a copy elsewhere."""
    entry, is_local = recipe.entry, recipe.entry.source.dataset in ROW_FORMATS
    if told is not None and told.rows is not None:
        return told, StreamedRows(told.rows, entry)
    if (
        told is not None
        and is_local
        and (is_address(path := told.files[0].path) or os.path.exists(path))
    ):
        content = _content(recipe, told.files) if is_first_here else told.content
        return replace(told, content=content), LocalDocuments(entry, told.files)
    documents = recipe.open(streamed=True)
    assert not isinstance(documents, TokenFiles)  # `resolve` has refused it
    if told is not None and not is_local:
        return told, documents
    files = recipe.files()
    rows = documents.rows if recipe.is_of_hub and isinstance(documents, StreamedRows) else None
    commit = revision(files) if recipe.is_of_hub else ""
    return Found(commit, content=_content(recipe, files), files=files, rows=rows), documents


def _content(recipe: TokenizationSpec, files: Sequence[DataFile]) -> str:
    try:
        some = sampled(files)
    except OSError as error:
        raise unreadable(recipe.entry, error) from error
    return f"{fingerprint(recipe.entry, files, is_portable=True)}, {some}, {recipe.method()}"
