"""From documents to a token cache, once, by all cores of all machines."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.storage.block_cache import BlockCache
from meshwright.datasets.token_cache.cache import (
    CACHE_KEY,
    DAMAGED,
    LENGTHS,
    DamagedCacheError,
    Part,
    TokenCache,
    read_index,
    read_notes,
)
from meshwright.datasets.token_cache.claims import Claims
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.token_cache.writing import (
    is_complete,
    join_parts,
    open_source,
    too_many_bad_records,
    write_part,
)
from meshwright.system.errors import ConfigError, numbered
from meshwright.system.files import remove_left_over
from meshwright.system.log import busy, logger
from meshwright.system.machine import count_cores
from meshwright.system.processes import die_with_parent

POLL_S, JOIN = 0.5, "join"
"""Seconds between two looks at the parts of others; the claim of who writes the index of all."""


def default_folder() -> Path:
    """Return where caches are kept unless the config says otherwise."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "meshwright"


def cache_folder(recipe: TokenizationSpec, root: Path) -> Path:
    """Return the folder of a source's cache; it need not be there."""
    name = recipe.entry.source.dataset.replace("/", "--")
    folder = root / f"{name}-{recipe.identity()}"
    before = getattr(recipe, "identity_before", None)
    if before is not None and not folder.exists():
        earlier = root / f"{name}-{before()}"
        if (earlier / "cache.npz").exists():  # jobs that began with it resume with it
            return earlier
    return folder


def open_cache(
    recipe: TokenizationSpec,
    root: Path,
    *,
    num_workers: int = 0,
    check_all: bool = False,
    max_bad_records: int = 0,
    blocks: BlockCache | None = None,
) -> TokenCache:
    """Open the token cache of `recipe` below `root`; make its missing parts first.

    Processes of any number of machines may call it at once: each makes some of the parts. Parts
    that an interrupted call left are used.

    Args:
        num_workers: processes that tokenise; 0: one a core.
        check_all: hold everything against its checksums now, not when it is read.
        max_bad_records: records that may be passed over.
        blocks: keeps what is read of object storage.

    Raises:
        ConfigError: if documents cannot be read, hold nothing, or there is no room for tokens; or
            if too many records are no documents.
    """
    open_source.cache_clear()  # a file may have changed since
    folder = cache_folder(recipe, root)
    try:
        cache = _open_if_good(folder, check_all, blocks)
        if cache is None:
            folder.mkdir(parents=True, exist_ok=True)
            making = _Making(recipe, folder, num_workers, check_all, max_bad_records, blocks)
            cache = making.run()
    except OSError as error:
        raise ConfigError(
            CACHE_KEY,
            f"{error.filename or folder}: {error.strerror or error}, while tokens were to be "
            f"read or written in {folder}"
            f"\n  fix: make room or give permission, or set {CACHE_KEY} to another folder",
        ) from error
    if cache.num_bad > max_bad_records:
        raise too_many_bad_records(cache.num_bad, cache.first_bad)
    return cache


def _open_if_good(folder: Path, check_all: bool, blocks: BlockCache | None) -> TokenCache | None:
    """Return the cache if nobody asks or has asked to look at its content."""
    if check_all or (folder / DAMAGED).exists():
        return None
    return _open_if_complete(folder, blocks)


def _open_if_complete(folder: Path, blocks: BlockCache | None) -> TokenCache | None:
    if not (folder / "cache.npz").exists():
        return None
    try:
        return TokenCache(folder, blocks=blocks)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", folder, damage)
        return None


@dataclass(frozen=True)
class _Todo:
    """The parts of a cache, for a worker."""

    recipe: TokenizationSpec
    parts: Sequence[Part]
    dtype: str
    wrong: dict[int, tuple[int, int]]
    """State of the indices of parts that are there and are to be made again."""
    max_bad_records: int

    def is_done(self, part: Part) -> bool:
        """Return whether somebody has made the part."""
        try:
            found = part.index.stat()
        except FileNotFoundError:
            return False
        return self.wrong.get(part.number) != (found.st_ino, found.st_mtime_ns)

    def left(self) -> list[Part]:
        """Return the parts that are not made; of `max_documents`, only those that are needed."""
        most = getattr(self.recipe.entry.source, "max_documents", 0)
        count, found, there = 0, [], set(os.listdir(self.parts[0].folder))
        for part in self.parts:
            is_there = part.index.name in there
            if not (is_there and (part.number not in self.wrong or self.is_done(part))):
                found.append(part)
            elif most and not found:
                count += len(read_index(part)["lengths"])
                if count >= most:
                    break
        return found


class _Making:
    """One process of one machine that makes a cache, with workers."""

    def __init__(
        self,
        recipe: TokenizationSpec,
        folder: Path,
        num_workers: int,
        check_all: bool,
        max_bad_records: int,
        blocks: BlockCache | None,
    ) -> None:
        self._recipe, self._folder, self._check_all = recipe, folder, check_all
        self._blocks, self._noted = blocks, read_notes(folder)
        self._was_there = (folder / "cache.npz").exists()
        documents, _ = open_source(recipe)
        if isinstance(documents, TokenFiles):
            files = documents.files
            parts, dtype = [Part(folder, n, file.path) for n, file in enumerate(files)], ""
        else:
            parts = [Part(folder, number) for number in range(documents.parts)]
            dtype = _dtype(recipe, documents.read_part(0))
        wrong = {}
        for part in parts:
            checks = check_all or str(part.number) in self._noted
            if not is_complete(recipe, part, dtype, checks) and part.index.exists():
                state = part.index.stat()
                wrong[part.number] = state.st_ino, state.st_mtime_ns
        self._todo = _Todo(recipe, parts, dtype, wrong, max_bad_records)
        self._num_workers = num_workers or count_cores()

    def run(self) -> TokenCache:
        """Make what is missing, together with whoever else does, and open the cache."""
        with Claims(self._folder) as claims:
            remove_left_over(self._folder, now=claims.now())
            missing = self._todo.left()
            if missing:
                self._tokenize(claims, missing)
            return self._join(claims, has_made=bool(missing))

    def _tokenize(self, claims: Claims, missing: Sequence[Part]) -> None:
        todo, name = self._todo, self._recipe.entry.name
        done = f", {len(todo.parts) - len(missing)} of {len(todo.parts)} parts are there"
        num_workers = min(self._num_workers, len(missing))
        logger.info(
            "tokenising %s into %s by %s%s",
            *(name, self._folder, numbered(num_workers, "process", "es")),
            done * (len(missing) < len(todo.parts)),
        )
        with _shown(name, todo) as counts:
            if num_workers == 1 or multiprocessing.current_process().daemon:  # has no children
                _work(todo, claims, counts)
            else:
                self._by_workers(num_workers - 1, claims, counts)
            while todo.left():  # others make them; or they are gone, and it is done here
                time.sleep(POLL_S)
                _work(todo, claims, counts)

    def _by_workers(self, num_workers: int, claims: Claims, counts: "_Counts") -> None:
        """Work beside other processes, which claim parts as this one does."""
        # not forked: a rank has threads
        context = multiprocessing.get_context("spawn")
        given = (os.getpid(), *counts)
        try:
            with ProcessPoolExecutor(num_workers, context, _begin, given) as pool:
                working = [pool.submit(_work_apart, self._todo) for _ in range(num_workers)]
                try:
                    _work(self._todo, claims, counts)
                    for future in working:
                        future.result()
                except BaseException:
                    counts.stop.value = 1
                    raise
        except BrokenProcessPool as error:
            raise ConfigError(
                CACHE_KEY,
                "a process that tokenised was killed: for want of memory?"
                "\n  fix: meshwright tokenize --workers 1; finished parts are kept",
            ) from error

    def _join(self, claims: Claims, has_made: bool) -> TokenCache:
        """Write the index of the whole, or wait until another process has."""
        is_wrong = has_made or self._check_all or LENGTHS in self._noted
        try:
            while True:
                # of a new cache: another process that was faster may have joined it
                if not (self._was_there and is_wrong):
                    cache = _open_if_complete(self._folder, self._blocks)
                    if cache is not None:
                        break
                if claims.take(JOIN):
                    join_parts(self._recipe, self._todo.parts, self._todo.dtype)
                    cache = TokenCache(self._folder, blocks=self._blocks)
                    break
                time.sleep(POLL_S)
            (self._folder / DAMAGED).unlink(missing_ok=True)
            return cache
        except DamagedCacheError as damage:  # someone else writes here, or the disk is failing
            what = f"{self._folder}: {damage}\n  fix: delete the folder"
            raise ConfigError(CACHE_KEY, what) from damage


def _dtype(recipe: TokenizationSpec, items: Iterator[Any]) -> str:
    """Little-endian; wide enough for the vocabulary, and for `NO_LOSS` in conversations."""
    documents = (item for item in items if isinstance(item, (str, list)) and item)
    is_chat = not isinstance(next(documents, ""), str)
    vocab_size = recipe.tokenizer.vocab_size
    return "<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4"


@dataclass(frozen=True)
class _Counts:
    """What the processes of this machine have done so far, in memory that they share."""

    bytes: Any
    tokens: Any
    stop: Any
    """1: an error ends all."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.bytes, self.tokens, self.stop))

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        """Add to them."""
        with self.bytes.get_lock():
            self.bytes.value += num_bytes
            self.tokens.value += num_tokens


_MINE: list[_Counts] = []


def _begin(parent: int, *counts: Any) -> None:
    die_with_parent(parent)
    _MINE.append(_Counts(*counts))


def _work_apart(todo: _Todo) -> None:
    with Claims(todo.parts[0].folder) as claims:
        _work(todo, claims, _MINE[0])


def _work(todo: _Todo, claims: Claims, counts: _Counts) -> None:
    """Make parts until none is left that nobody has claimed."""
    has_made = True
    while has_made:
        has_made = False
        for part in todo.left():
            if counts.stop.value:
                return
            if todo.is_done(part) or not claims.take(str(part.number)):
                continue
            has_made = True
            _make(todo, part, claims, counts)
            if getattr(todo.recipe.entry.source, "max_documents", 0):
                break  # fewer may be left than were


def _make(todo: _Todo, part: Part, claims: Claims, counts: _Counts) -> None:
    """Make a part that is claimed, unless somebody has made it before that."""
    try:
        if not todo.is_done(part):
            pending = _Pending(counts)
            write_part(todo.recipe, part, todo.dtype, todo.max_bad_records, pending.advance)
            pending.flush()
    except BaseException:
        counts.stop.value = 1
        raise
    finally:
        claims.release(str(part.number))


class _Pending:
    """Counts that are added up before they are told: the lock would cost more than the count."""

    EVERY = 1 << 18

    def __init__(self, counts: _Counts) -> None:
        self._counts, self._bytes, self._tokens = counts, 0, 0

    def advance(self, num_bytes: int, num_tokens: int) -> None:
        """Add to the counts, at once or later."""
        self._bytes += num_bytes
        self._tokens += num_tokens
        if self._bytes >= self.EVERY:
            self.flush()

    def flush(self) -> None:
        """Add what is pending."""
        self._counts.advance(self._bytes, self._tokens)
        self._bytes = self._tokens = 0


@contextmanager
def _shown(name: str, todo: _Todo) -> Iterator[_Counts]:
    """Show how far the making is: a bar on a terminal, lines elsewhere; at the end the sum."""
    context = multiprocessing.get_context("spawn")
    counts = _Counts(context.Value("q", 0), context.Value("q", 0), context.Value("b", 0))
    total, start = len(todo.parts), time.perf_counter()
    at_first = total - len(todo.left())

    def rates() -> str:
        seconds = max(time.perf_counter() - start, 1e-3)
        mb, tokens = counts.bytes.value / 1e6 / seconds, counts.tokens.value / seconds
        return f"{mb:,.1f} MB/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")

    def far() -> str:
        done, seconds = total - len(todo.left()), time.perf_counter() - start
        made = done - at_first
        eta = f", about {seconds / made * (total - done):,.0f} s left" if made else ""
        return f"{done} of {total} parts, {rates()}{eta}"

    bar = tqdm(total=total, initial=at_first, unit="part", desc=name, disable=None)
    with bar, _refreshed(bar, todo, rates) if not bar.disable else busy(f"tokenising {name}", far):
        yield counts
    seconds = time.perf_counter() - start
    logger.info("tokenised %s in %.1f s: %s here", name, seconds, rates())


@contextmanager
def _refreshed(bar: Any, todo: _Todo, rates: Any) -> Iterator[None]:
    """Keep a bar up to date: other machines make parts, too."""
    is_over = threading.Event()

    def refresh() -> None:
        while not is_over.wait(POLL_S):
            bar.n = bar.total - len(todo.left())
            bar.set_postfix_str(rates())

    thread = threading.Thread(target=refresh, name="bar", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        bar.n = bar.total - len(todo.left())
        bar.refresh()
