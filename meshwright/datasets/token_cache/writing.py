"""Writes the files of a token cache."""

import functools
import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import NO_LOSS, Encoder
from meshwright.datasets.files import Entry
from meshwright.datasets.rows import Documents
from meshwright.datasets.token_cache.cache import (
    BLOCK_BYTES,
    BLOCK_DOCUMENTS,
    LENGTHS,
    OF_PART,
    DamagedCacheError,
    Part,
    changed_source,
    checksums,
    load_arrays,
    map_file,
)
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.foreign_tokens import FormatError, TokenFile, TokenFiles
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import well_formed
from meshwright.system.errors import ConfigError, RecordError
from meshwright.system.files import whole_file
from meshwright.system.log import logger

Array = npt.NDArray[np.generic]


ENOUGH_TOKENS = 64
"""Of which every second would not be 0 by chance."""


def index_tokens(file: TokenFile, tokenizer: Tokenizer) -> dict[str, Array]:
    """Read the file once: lengths of its documents, checksums, and bytes of text.

    Raises:
        FormatError: if it holds an id that the tokenizer has not, or no ends of documents, or if
            it has no header and looks like tokens of a wider type.
    """
    if file.lengths is None and tokenizer.eos_id is None:
        raise FormatError("its documents cannot be told apart: the tokenizer has no EOS")
    try:
        bytes_of = np.array(tokenizer.token_bytes)
    except ConfigError:  # this tokenizer does not tell; nothing but a line in the log needs it
        bytes_of = np.zeros(tokenizer.vocab_size, np.int64)
    checksums, ends, num_bytes, begin = list[int](), [np.empty(0, np.int64)], 0, 0
    may_be_halves = file.is_bare and file.num_tokens >= ENOUGH_TOKENS
    for tokens in file.chunks():
        if int(tokens.max()) >= tokenizer.vocab_size:
            where = begin + int(np.flatnonzero(tokens >= tokenizer.vocab_size)[0])
            raise FormatError(
                f"token {where} has id {int(tokens[where - begin])}, and the tokenizer has "
                f"{tokenizer.vocab_size}: it is of another tokenizer, or of another type"
            )
        may_be_halves = may_be_halves and not tokens[1::2].any()
        content = tokens.tobytes()
        checksums += [
            zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)
        ]
        num_bytes += int(bytes_of[tokens].sum())
        if file.lengths is None:
            found = np.flatnonzero(tokens == tokenizer.eos_id) + begin
            ends.append(found if file.has_eos_first else found + 1)
        begin += len(tokens)
    if may_be_halves:
        raise FormatError(
            f"every second token is 0: they are wider than {np.dtype(file.dtype).name}, which the "
            "tokenizer's vocabulary stands for where there is no header; convert it, or np.save it"
        )
    lengths = file.lengths
    if lengths is None:
        bounds = np.unique(np.concatenate([[0], *ends, [begin]]))
        lengths = np.diff(bounds).astype(np.uint32)
    return {
        "lengths": lengths,
        "token_checksums": np.array(checksums, np.uint32),
        "num_bytes": np.int64(num_bytes),  # type: ignore[dict-item]  # an array of no dimension
    }


@functools.lru_cache(1)
def open_source(recipe: TokenizationSpec) -> tuple[Documents | TokenFiles, Encoder]:
    """A worker opens its source once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return recipe.open(streamed=False), recipe.encoder()


def write_part(recipe: TokenizationSpec, part: Part, dtype: str) -> int:
    """Tokenise the documents of one part; the number of its tokens."""
    if is_complete(part, dtype):  # another machine, whose lock is not seen here, was faster
        return int(load_arrays(part.index, OF_PART)["lengths"].sum(dtype=np.uint64))
    documents, encoder = open_source(recipe)
    if isinstance(documents, TokenFiles):
        return _index_part(recipe, documents, part)
    lengths, num_bytes = [], 0
    has_flags = np.dtype(dtype).itemsize == 4
    with whole_file(part.tokens) as raw_file:
        file = _Checksummed(raw_file)
        for document in documents.read_part(part.number):
            if isinstance(document, RecordError):
                raise document
            tokens = encoder.encode(document)
            if not has_flags and len(tokens) and tokens.max() >= NO_LOSS:
                raise recipe.entry.error(
                    "dataset_column", "holds texts and conversations: they must be one kind"
                )
            if len(tokens):
                file.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
                num_bytes += _num_bytes(document)
        token_checksums = file.finish()
    _save_arrays(
        part.index,
        lengths=np.array(lengths, np.uint32),
        token_checksums=np.array(token_checksums, np.uint32),
        num_bytes=np.int64(num_bytes),
    )
    return sum(lengths)


def is_complete(part: Part, dtype: str, checks_content: bool = False) -> bool:
    """Return whether a part is there; one that is damaged is noted as not.

    Raises:
        ConfigError: if a file of others is not as it was when it was indexed.
    """
    if not part.index.exists() or not part.tokens.exists():
        return False
    try:
        index = load_arrays(part.index, OF_PART)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", part.folder, damage)
        part.index.unlink(missing_ok=True)
        return False
    size = int(index["lengths"].sum(dtype=np.uint64)) * np.dtype(dtype).itemsize
    is_same = part.tokens.stat().st_size == part.offset + size
    if is_same and checks_content:
        found = checksums(part.tokens, offset=part.offset)
        is_same = np.array_equal(found, index["token_checksums"])
    if is_same:
        return True
    if part.source is not None:
        raise changed_source(part, "its size or content")
    logger.warning("%s is damaged: made again", part.tokens)
    part.index.unlink(missing_ok=True)
    return False


def _index_part(recipe: TokenizationSpec, files: TokenFiles, part: Part) -> int:
    """Write the index of one file of tokens; return the number of its tokens."""
    tokenizer = build_tokenizer(recipe.tokenizer_path)
    file = files.open_one(part.number, tokenizer.vocab_size)
    try:
        index = index_tokens(file, tokenizer)
    except (FormatError, OSError) as error:
        raise files.error(file.path, str(error)) from error
    _save_arrays(part.index, **index)
    return file.num_tokens


class _Checksummed:
    """Takes the checksum of each block in memory, before it is written, not of the bytes a disk
    has made of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._pending = file, bytearray()
        self._checksums: list[int] = []

    def write(self, content: bytes) -> None:
        self._pending += content
        while len(self._pending) >= BLOCK_BYTES:
            self._write(bytes(self._pending[:BLOCK_BYTES]))
            del self._pending[:BLOCK_BYTES]

    def finish(self) -> list[int]:
        """Write the rest; the checksums of all blocks."""
        if self._pending:
            self._write(bytes(self._pending))
            self._pending.clear()
        return self._checksums

    def _write(self, block: bytes) -> None:
        self._checksums.append(zlib.crc32(block))
        self._file.write(block)


def _num_bytes(document: Any) -> int:
    texts = [document] if isinstance(document, str) else [turn["content"] for turn in document]
    return sum(len(well_formed(text).encode()) for text in texts)


def join_parts(entry: Entry, folder: Path, parts: Sequence[Part], dtype: str) -> None:
    """Merge the part indices into the index of the cache.

    Raises:
        ConfigError: if it is nothing.
    """
    content, num_bytes, per_part = hashlib.sha256(dtype.encode()), 0, []
    with whole_file(folder / LENGTHS) as file:
        for part in parts:  # one in memory at a time
            index = load_arrays(part.index, OF_PART)
            content.update(index["token_checksums"].tobytes())
            content.update(index["lengths"].tobytes())
            file.write(index["lengths"].astype("<u4").tobytes())
            per_part.append(index["lengths"].sum(dtype=np.uint64))
            num_bytes += int(index["num_bytes"])
        if not sum(per_part):
            raise entry.error("dataset", "holds no text")
    lengths = map_file(folder / LENGTHS, np.uint32)
    firsts = np.arange(0, len(lengths), BLOCK_DOCUMENTS)
    per_block = np.add.reduceat(lengths, firsts, dtype=np.uint64)
    _save_arrays(
        folder / "cache.npz",
        content=np.str_(content.hexdigest()[:16]),
        num_bytes=np.int64(num_bytes),
        num_documents=np.int64(len(lengths)),
        dtype=np.str_(dtype),
        part_starts=_starts(per_part),
        block_starts=_starts(per_block),
        length_checksums=checksums(folder / LENGTHS, 4 * BLOCK_DOCUMENTS),
    )


def _starts(sizes: Any) -> Any:
    """(n,) sizes -> (n + 1,) where each begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.uint64)]).astype(np.uint64)


def _save_arrays(path: Path, **arrays: Any) -> None:
    """Write an .npz."""
    with whole_file(path) as file:
        np.savez(file, **arrays)
