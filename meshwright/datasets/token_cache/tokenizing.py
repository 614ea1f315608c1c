"""From documents to a token cache, once, by all cores."""

import fcntl
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tqdm import tqdm

from meshwright.datasets.token_cache.cache import (
    CACHE_KEY,
    DAMAGED,
    LENGTHS,
    DamagedCacheError,
    Part,
    TokenCache,
    read_notes,
    save_sources,
)
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.token_cache.writing import is_complete, join_parts, open_source, write_part
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.system.errors import ConfigError
from meshwright.system.files import lock, remove_left_over
from meshwright.system.log import busy, logger
from meshwright.system.machine import count_cores
from meshwright.system.processes import die_with_parent


def default_folder() -> Path:
    """Return where caches are kept unless the config says otherwise."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "meshwright"


def open_cache(
    recipe: TokenizationSpec, root: Path, *, num_workers: int = 0, check_all: bool = False
) -> TokenCache:
    """Open the token cache of `recipe` below `root`; make its missing parts first.

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
    open_source.cache_clear()  # a file may have changed since
    try:
        cache = _open_if_good(folder, check_all)
        if cache is not None:
            return cache
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            cache = _open_if_good(folder, check_all)
            return cache or _make(recipe, folder, num_workers, check_all)
    except OSError as error:
        raise ConfigError(
            CACHE_KEY,
            f"{error.filename or folder}: {error.strerror or error}, while tokens were to be "
            f"read or written in {folder}"
            f"\n  fix: make room or give permission, or set {CACHE_KEY} to another folder",
        ) from error


def _open_if_good(folder: Path, check_all: bool) -> TokenCache | None:
    """Return the cache if nobody asks or has asked to look at its content."""
    return None if check_all or (folder / DAMAGED).exists() else _open_if_complete(folder)


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
    """Hold the lock of the cache, which its owner's death frees.

    It saves work, and nothing depends on it: where it is not there, or holds on one machine alone,
    several machines make the same files, each under names of its own, and the first to finish one
    gives it its name.
    """
    with open(folder / "lock", "w") as file:
        if not lock(file, fcntl.LOCK_EX, folder, "jobs must not tokenise the same data at once"):
            logger.info("another process is tokenising into %s: waiting for it", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(recipe: TokenizationSpec, folder: Path, num_workers: int, check_all: bool) -> TokenCache:
    """Tokenise the parts that are not there, then join all."""
    os.utime(folder / "lock")
    remove_left_over(folder, now=(folder / "lock").stat().st_mtime)
    noted, is_new = read_notes(folder), not (folder / "cache.npz").exists()
    entry = recipe.entry
    documents = recipe.open(streamed=False)
    if isinstance(documents, TokenFiles):
        files = documents.open(build_tokenizer(recipe.tokenizer_path).vocab_size)
        dtype = files[0].dtype
        parts = [Part(folder, n, file.path, file.offset) for n, file in enumerate(files)]
        save_sources(folder, parts)
    else:
        first = next(iter(documents.read_part(0)), "")
        dtype = _dtype(recipe, is_chat=not isinstance(first, str))
        parts = [Part(folder, number) for number in range(documents.parts)]
    missing = [
        part
        for part in parts
        if not is_complete(part, dtype, check_all or str(part.number) in noted)
    ]
    if missing:
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
        # others may read the files by now, of another machine that was faster too
        is_joined = is_new or not (missing or check_all or LENGTHS in noted)
        cache = _open_if_complete(folder) if is_joined else None
        if cache is None:
            join_parts(entry, folder, parts, dtype)
            cache = TokenCache(folder)
        (folder / DAMAGED).unlink(missing_ok=True)
        return cache
    except DamagedCacheError as damage:  # someone else writes here, or the disk is failing
        raise ConfigError(CACHE_KEY, f"{folder}: {damage}\n  fix: delete the folder") from damage


def _dtype(recipe: TokenizationSpec, is_chat: bool) -> str:
    """Little-endian; wide enough for the vocabulary, and for `NO_LOSS` in conversations."""
    vocab_size = build_tokenizer(recipe.tokenizer_path).vocab_size
    return "<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4"


def _tokenize(recipe: TokenizationSpec, parts: Sequence[Part], dtype: str, num_workers: int) -> int:
    """Write `parts`; the number of their tokens."""
    num_workers = min(num_workers or count_cores(), len(parts))
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
