"""From documents to a token cache, once, by all cores."""

import fcntl
import functools
import hashlib
import multiprocessing
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from meshwright.datasets.encoding import NO_LOSS, Encoder
from meshwright.datasets.entry import Entry
from meshwright.datasets.indexing import index_tokens
from meshwright.datasets.sources import Documents
from meshwright.datasets.token_cache import (
    BLOCK_BYTES,
    BLOCK_DOCUMENTS,
    CACHE_KEY,
    OF_PART,
    DamagedCacheError,
    Part,
    TokenCache,
    checksums,
    load_arrays,
    save_sources,
)
from meshwright.datasets.token_files import FormatError, TokenFiles
from meshwright.datasets.tokenization_spec import TokenizationSpec
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.datasets.tokenizers.well_formed import well_formed
from meshwright.errors import ConfigError
from meshwright.launch.process import die_with_parent
from meshwright.log import busy, logger


def default_folder() -> Path:
    """Where caches are kept unless the config says otherwise."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "meshwright"


def open_cache(
    recipe: TokenizationSpec, root: Path, *, num_workers: int = 0, check_all: bool = False
) -> TokenCache:
    """The token cache of `recipe` below `root`, made first as far as it is not there.

    Several processes may call it at once: one makes it, the others wait. Parts that an
    interrupted call left are used.

    Args:
        num_workers: processes that tokenise; 0: one a core.
        check_all: hold everything against its checksums now, not when it is read.

    Raises:
        ConfigError: if documents cannot be read, hold nothing, or there is no room for tokens.
    """
    name = recipe.entry.source.dataset.replace("/", "--")
    folder = root / f"{name}-{recipe.identity()}"
    _opened.cache_clear()  # a file may have changed since
    try:
        cache = None if check_all else _open_if_complete(folder)
        if cache is not None:
            return cache
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            cache = None if check_all else _open_if_complete(folder)
            return cache or _make(recipe, folder, num_workers, check_all)
    except OSError as error:
        raise ConfigError(
            CACHE_KEY,
            f"{error.filename or folder}: {error.strerror or error}, while tokens were to be "
            f"read or written in {folder}"
            f"\n  fix: make room or give permission, or set {CACHE_KEY} to another folder",
        ) from error


def _open_if_complete(folder: Path) -> TokenCache | None:
    if not (folder / "cache.npz").exists():
        return None
    try:
        return TokenCache(folder)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", folder, damage)
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the cache, which its owner's death frees."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is tokenising into %s: waiting for it", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(recipe: TokenizationSpec, folder: Path, num_workers: int, check_all: bool) -> TokenCache:
    """Tokenise the parts that are not there, then join all."""
    for left_over in folder.glob("*.unfinished"):  # by processes that were killed
        left_over.unlink()
    entry = recipe.entry
    documents = recipe.open(streamed=False)
    if isinstance(documents, TokenFiles):
        files = documents.open(build_tokenizer(recipe.tokenizer_path).vocab_size)
        dtype = files[0].dtype
        parts = [Part(folder, n, file.path, file.offset) for n, file in enumerate(files)]
        save_sources(folder, parts)
    else:
        first = next(iter(documents.read(0, documents.parts)), "")
        dtype = _dtype(recipe, is_chat=not isinstance(first, str))
        parts = [Part(folder, number) for number in range(documents.parts)]
    missing = [part for part in parts if not _is_complete(part, dtype, check_all)]
    if missing:
        (folder / "cache.npz").unlink(missing_ok=True)
        done = f", {len(parts) - len(missing)} of {len(parts)} parts are there" * (
            len(missing) < len(parts)
        )
        logger.info("tokenising %s into %s%s", entry.name, folder, done)
        start = time.perf_counter()
        num_tokens = _tokenize(recipe, missing, dtype, num_workers)
        seconds = time.perf_counter() - start
        logger.info(
            "tokenised %s tokens in %.1f s, %s a second",
            f"{num_tokens:,}",
            seconds,
            f"{num_tokens / seconds:,.0f}",
        )
    try:
        _join(entry, folder, parts, dtype)
        return TokenCache(folder)
    except DamagedCacheError as damage:  # someone else writes here, or the disk is failing
        raise ConfigError(CACHE_KEY, f"{folder}: {damage}\n  fix: delete the folder") from damage


def _dtype(recipe: TokenizationSpec, is_chat: bool) -> str:
    """Little-endian; wide enough for the vocabulary, and for `NO_LOSS` in conversations."""
    vocab_size = build_tokenizer(recipe.tokenizer_path).vocab_size
    return "<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4"


def _is_complete(part: Part, dtype: str, check_all: bool) -> bool:
    if not part.index.exists() or not part.tokens.exists():
        return False
    try:
        index = load_arrays(part.index, OF_PART)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", part.folder, damage)
        return False
    size = int(index["lengths"].sum(dtype=np.uint64)) * np.dtype(dtype).itemsize
    is_same = part.tokens.stat().st_size == part.offset + size
    if is_same and check_all:
        found = checksums(part.tokens, offset=part.offset)
        is_same = np.array_equal(found, index["token_checksums"])
    if not is_same:
        logger.warning("%s is damaged: made again", part.tokens)
    return is_same


def _tokenize(recipe: TokenizationSpec, parts: Sequence[Part], dtype: str, num_workers: int) -> int:
    """Write `parts`; the number of their tokens."""
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), len(parts))
    bar = tqdm(total=len(parts), unit="part", desc=recipe.entry.name, disable=None)
    counts: list[int] = []  # tokens of each part that is done
    speaking = busy(
        f"tokenising {recipe.entry.name}", lambda: f"{len(counts)} of {len(parts)} parts"
    )
    with bar, speaking if bar.disable else nullcontext():
        if num_workers == 1 or multiprocessing.current_process().daemon:  # may have no children
            for part in parts:
                counts.append(write_part(recipe, part, dtype))
                bar.update()
            return sum(counts)
        # not forked: a rank has threads
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(num_workers - 1, context, die_with_parent, (os.getpid(),))
        waiting, running = deque(parts), set[Future[int]]()
        try:
            with pool:
                while waiting or running:
                    # few ahead, so that an error is noticed before much else is done
                    while waiting and len(running) < 2 * (num_workers - 1):
                        running.add(pool.submit(write_part, recipe, waiting.popleft(), dtype))
                    if waiting:  # this process is one of them, and at work while others start
                        counts.append(write_part(recipe, waiting.popleft(), dtype))
                        bar.update()
                    done, running = futures.wait(
                        running, 0 if waiting else None, futures.FIRST_COMPLETED
                    )
                    for future in done:
                        counts.append(future.result())
                        bar.update()
        except BrokenProcessPool as error:
            raise ConfigError(
                CACHE_KEY,
                "a process that tokenised was killed: for want of memory?"
                "\n  fix: meshwright tokenize --workers 1; finished parts are kept",
            ) from error
        return sum(counts)


@functools.lru_cache(1)
def _opened(recipe: TokenizationSpec) -> tuple[Documents | TokenFiles, Encoder]:
    """A worker opens its source once."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return recipe.open(streamed=False), recipe.encoder()


def write_part(recipe: TokenizationSpec, part: Part, dtype: str) -> int:
    """Tokenise the documents of one part; the number of its tokens."""
    documents, encoder = _opened(recipe)
    if isinstance(documents, TokenFiles):
        return _index_part(recipe, documents, part)
    lengths, num_bytes = [], 0
    unfinished = part.tokens.with_suffix(f".{os.getpid()}.unfinished")
    has_flags = np.dtype(dtype).itemsize == 4
    try:
        with open(unfinished, "wb") as raw_file:
            file = _Checksummed(raw_file)
            for document in documents.read(part.number, documents.parts):
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
            raw_file.flush()
            os.fsync(raw_file.fileno())
        os.replace(unfinished, part.tokens)
    finally:
        unfinished.unlink(missing_ok=True)
    _save(
        part.index,
        lengths=np.array(lengths, np.uint32),
        token_checksums=np.array(token_checksums, np.uint32),
        num_bytes=np.int64(num_bytes),
    )
    return sum(lengths)


def _index_part(recipe: TokenizationSpec, files: TokenFiles, part: Part) -> int:
    """Write the index of one file of tokens; return the number of its tokens."""
    tokenizer = build_tokenizer(recipe.tokenizer_path)
    file = files.open(tokenizer.vocab_size)[part.number]
    try:
        index = index_tokens(file, tokenizer)
    except (FormatError, OSError) as error:
        raise files.error(file.path, str(error)) from error
    _save(part.index, **index)
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


def _join(entry: Entry, folder: Path, parts: Sequence[Part], dtype: str) -> None:
    """Merge the part indices into the index of the cache.

    Raises:
        ConfigError: if it is nothing.
    """
    content, num_bytes, lengths_of = hashlib.sha256(dtype.encode()), 0, []
    for part in parts:
        index = load_arrays(part.index, OF_PART)
        content.update(index["token_checksums"].tobytes())
        content.update(index["lengths"].tobytes())
        lengths_of.append(index["lengths"])
        num_bytes += int(index["num_bytes"])
    lengths = np.concatenate(lengths_of).astype("<u4")
    if not len(lengths):
        raise entry.error("dataset", "holds no text")
    unfinished = folder / "lengths.unfinished"
    with open(unfinished, "wb") as file:
        file.write(lengths.tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / "lengths")
    firsts = np.arange(0, len(lengths), BLOCK_DOCUMENTS)
    per_block = np.add.reduceat(lengths, firsts, dtype=np.uint64)
    per_part = [part_lengths.sum(dtype=np.uint64) for part_lengths in lengths_of]
    _save(
        folder / "cache.npz",
        content=np.str_(content.hexdigest()[:16]),
        num_bytes=np.int64(num_bytes),
        num_documents=np.int64(len(lengths)),
        dtype=np.str_(dtype),
        part_starts=_starts(per_part),
        block_starts=_starts(per_block),
        length_checksums=checksums(folder / "lengths", 4 * BLOCK_DOCUMENTS),
    )


def _starts(sizes: Any) -> Any:
    """(n,) sizes -> (n + 1,) where each begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.uint64)]).astype(np.uint64)


def _save(path: Path, **arrays: Any) -> None:
    """Write an .npz that appears under its name only when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
