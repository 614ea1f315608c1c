"""Writes the files of a token cache: of a part, and of the whole."""

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.datasets.conversations import Document
from meshwright.datasets.data_file import ChangedError
from meshwright.datasets.encoding import NO_LOSS, Encoder
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.rows import Documents
from meshwright.datasets.token_cache.cache import BLOCK_DOCUMENTS, LENGTHS
from meshwright.datasets.token_parts import (
    BLOCK_BYTES,
    DamagedCacheError,
    Part,
    PartIndex,
    PartTokens,
    changed_source,
    load_index,
    starts_of,
)
from meshwright.datasets.tokenizers.special_tokens import well_formed
from meshwright.system.errors import FIX, RecordError
from meshwright.system.files import whole_file
from meshwright.system.log import logger

Advance = Callable[[int, int], None]
"""Called with bytes of text, or of a file, and tokens that are done since the last call."""


@functools.lru_cache(1)
def open_source(recipe: TokenizationSpec) -> tuple[Documents | TokenFiles, Encoder]:
    """A worker opens its source once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return recipe.open(streamed=False), recipe.encoder()


MESSAGES_KEPT = 3
"""Of the bad records of each part."""


def write_part(
    recipe: TokenizationSpec, part: Part, dtype: str, max_bad_records: int, advance: Advance
) -> None:
    """Tokenize the documents of one part, or index its file of tokens.

    Raises:
        ConfigError: if its documents can't be read, or more than `max_bad_records` are none.
    """
    documents, encoder = open_source(recipe)
    if isinstance(documents, TokenFiles):
        index = documents.index(part.number, recipe.tokenizer)
        advance(documents.files[part.number].size, 0)
    else:
        index = _tokenize_part(documents, encoder, recipe, part, dtype, max_bad_records, advance)
    # thousands of flushes take a minute; an index that a power cut damages is made again
    is_flushed = part.source is None
    _save_arrays(part.index, is_flushed=is_flushed, **index._asdict())


def _tokenize_part(
    documents: Documents,
    encoder: Encoder,
    recipe: TokenizationSpec,
    part: Part,
    dtype: str,
    max_bad_records: int,
    advance: Advance,
) -> PartIndex:
    """Write the tokens of a part, and return its index."""
    lengths, num_bytes, bad = list[int](), 0, list[RecordError]()
    before = encoder.num_lost, encoder.num_characters
    has_flags = np.dtype(dtype).itemsize == 4
    with whole_file(part.own) as raw_file:
        file = _Checksummed(raw_file, BLOCK_BYTES)
        for document in documents.read_part(part.number):
            try:
                if isinstance(document, RecordError):
                    raise document
                tokens = encoder.encode(document)
            except RecordError as error:
                bad.append(error)
                if len(bad) > max_bad_records:
                    raise too_many_bad_records(len(bad), str(bad[0])) from error
                continue
            if not len(tokens):
                continue
            if not has_flags and tokens.max() >= NO_LOSS:
                raise recipe.entry.error(
                    "dataset_column", "holds text and conversations: they must be one kind"
                )
            file.write(tokens.astype(dtype).tobytes())
            lengths.append(len(tokens))
            size = _num_bytes(document)
            num_bytes += size
            advance(size, len(tokens))
        file.flush()
    return PartIndex(
        np.array(lengths, np.uint32),
        np.array(file.checksums, np.uint32),
        num_bytes,
        dtype,
        num_bad=len(bad),
        bad=np.array([str(error) for error in bad[:MESSAGES_KEPT]], np.str_),
        num_lost=encoder.num_lost - before[0],
        num_characters=encoder.num_characters - before[1],
    )


def too_many_bad_records(count: int, first: str) -> RecordError:
    """Return the error of a cached source in which too many records are no documents."""
    what, _, fix = first.partition(FIX)
    what += f"\n  ({count:,} records are no documents)" if count > 1 else ""
    fix = fix or "correct the data"
    fix += f", or pass over such records: training.max_bad_records = {count}"
    return RecordError("training.max_bad_records", f"{what}{FIX}{fix}")


def is_damaged(part: Part, checks_content: bool) -> bool:
    """Return whether a part is there, but not as it was written. Nothing is deleted: others may
    read it.

    Raises:
        ConfigError: if a file of others isn't as it was when it was indexed.
    """
    if not part.index.exists():
        return False
    try:
        index = load_index(part)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", part.folder, damage)
        return True
    try:
        size = part.own.stat().st_size if part.source is None else part.source.size
        if size != index.offset + index.size:
            raise DamagedCacheError("it has a different size")
        if checks_content:
            PartTokens(part, index).check()
    except (DamagedCacheError, ChangedError, FileNotFoundError) as damage:
        if part.source:
            raise changed_source(part, str(damage)) from damage
        logger.warning("%s is damaged (%s): made again", part.tokens, damage)
        return True
    return False


class _Checksummed:
    """Writes blocks, and takes the checksum of each as it is in memory; and the sum of its numbers,
    if they are lengths."""

    def __init__(self, file: BinaryIO, block_bytes: int, *, is_of_lengths: bool = False) -> None:
        self._file, self._block_bytes, self._pending = file, block_bytes, bytearray()
        self._is_of_lengths = is_of_lengths
        self.checksums, self.sums = list[int](), list[int]()

    def write(self, content: bytes) -> None:
        self._pending += content
        while len(self._pending) >= self._block_bytes:
            self.flush()

    def flush(self) -> None:
        """Write a block, or the rest."""
        block = bytes(self._pending[: self._block_bytes])
        del self._pending[: self._block_bytes]
        if not block:
            return
        self.checksums.append(zlib.crc32(block))
        if self._is_of_lengths:
            self.sums.append(int(np.frombuffer(block, "<u4").sum(dtype=np.uint64)))
        self._file.write(block)


def _num_bytes(document: Document) -> int:
    texts = [document] if isinstance(document, str) else document.texts
    return sum(len(well_formed(text).encode()) for text in texts)


def join_parts(recipe: TokenizationSpec, parts: Sequence[Part]) -> None:
    """Merge the part indices into the index of the cache; the lengths are never all in memory.

    Raises:
        ConfigError: if it is nothing, or files of others are of several types.
    """
    entry, folder = recipe.entry, parts[0].folder
    left = entry.source.max_documents or None
    num_bytes, num_documents, num_bad, first_bad, dtype = 0, 0, 0, "", ""
    num_lost, num_characters = 0, 0
    sizes, located, content = list[int](), list[tuple[str, int, str]](), hashlib.sha256()
    with whole_file(folder / LENGTHS) as raw_file:
        file = _Checksummed(raw_file, 4 * BLOCK_DOCUMENTS, is_of_lengths=True)
        for part in parts:  # one in memory at a time
            index = load_index(part)
            if not located:
                dtype = index.dtype
                content.update(dtype.encode())
            elif index.dtype != dtype:
                what = f"is of type {index.dtype}, and {parts[0].tokens} of {dtype}"
                raise entry.error("dataset_path", f"{part.tokens}: {what}")
            located.append((part.tokens if part.source else "", index.offset, index.stamp))
            sizes.append(index.num_tokens)
            lengths = index.lengths[:left].astype("<u4")
            content.update(index.token_checksums.tobytes())
            content.update(lengths.tobytes())
            file.write(lengths.tobytes())
            kept = int(lengths.sum(dtype=np.uint64)) / max(index.num_tokens, 1)
            num_bytes += round(index.num_bytes * kept)  # of a truncated part, its share
            num_documents += len(lengths)
            num_bad += index.num_bad
            num_lost += index.num_lost
            num_characters += index.num_characters
            first_bad = first_bad or next(iter(index.bad.tolist()), "")
            if left is not None and (left := left - len(lengths)) <= 0:
                break
        file.flush()
    if not sum(sizes):
        keys = ["validation_fraction"] if entry.held_out else []
        if entry.source.dataset_where:
            keys.append("dataset_where")
        rule, fix = "holds no text", "name other files"
        if keys:
            rule, fix = f"{rule} that is left by {' and '.join(keys)}", f"change {keys[-1]}"
        raise entry.error("dataset", rule, fix)
    sources, offsets, stamps = map(np.array, zip(*located, strict=True))
    _save_arrays(
        folder / "cache.npz",
        content=content.hexdigest()[:16],
        num_bytes=num_bytes,
        num_documents=num_documents,
        dtype=dtype,
        part_starts=starts_of(sizes),
        block_starts=starts_of(file.sums),
        length_checksums=np.array(file.checksums, np.uint32),
        sources=sources,
        offsets=offsets,
        stamps=stamps,
        num_bad=num_bad,
        first_bad=first_bad,
        num_lost=num_lost,
        num_characters=num_characters,
    )


def _save_arrays(path: Path, *, is_flushed: bool = True, **arrays: Any) -> None:
    """Write an .npz."""
    with whole_file(path, is_flushed=is_flushed) as file:
        np.savez(file, **arrays)
