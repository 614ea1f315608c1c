"""From documents to a token cache, once, by all cores of all nodes."""

import functools
import itertools
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from meshwright.datasets.block_cache import BlockCache
from meshwright.datasets.conversations import note_of_unused
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.token_cache.cache import DAMAGED, LENGTHS, TokenCache
from meshwright.datasets.token_cache.writing import (
    is_damaged,
    join_parts,
    open_source,
    too_many_bad_records,
    write_part,
)
from meshwright.datasets.token_parts import CACHE_KEY, DamagedCacheError, Part, load_index
from meshwright.system.errors import ConfigError, RecordError, check, numbered
from meshwright.system.files import remove_left_over
from meshwright.system.lease import Lease
from meshwright.system.log import busy, logger
from meshwright.system.machine import count_cores
from meshwright.system.processes import die_with_parent

POLL_S, JOIN = 0.5, "join"
"""Seconds between two looks at the parts of others; the lease of who writes the index of all."""

FILES_TOGETHER = 64
"""Files of tokens that have one lease: looking at one takes no longer than leasing it."""


def cache_root(given: str) -> Path:
    """Return the folder of all caches: the one that the config gives, or the user's own.

    Raises:
        ConfigError: neither is there; a container's user may have no home.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    rule = "this user has no home folder, where caches would be: HOME is not set"
    check(bool(given) or home[0] != "~", "training.token_cache_folder", given, rule, "name one")
    return Path(given or f"{home}/meshwright")


def cache_folder(recipe: TokenizationSpec, root: Path) -> Path:
    """Return the folder of a source's cache; it need not be there."""
    name = recipe.entry.source.dataset.replace("/", "--")
    return root / f"{name}-{recipe.id}"


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

    Processes of any number of nodes may call it at once: each makes some of the parts. Parts
    that an interrupted call left are used.

    Args:
        num_workers: processes that tokenize; 0: one a core.
        check_all: hold everything against its checksums now, not when it is read.

    Raises:
        ConfigError: if documents can't be read, hold nothing, or there is no room for tokens; or
            if too many records are no documents.
    """
    open_source.cache_clear()  # a file may have changed since
    folder = cache_folder(recipe, root)
    try:
        # unless somebody asks, or has asked, to look at its content
        is_good = not check_all and not (folder / DAMAGED).exists()
        cache = _open_if_complete(folder, blocks) if is_good else None
        if cache is None:
            folder.mkdir(parents=True, exist_ok=True)
            cache = _make(recipe, folder, num_workers, check_all, max_bad_records, blocks)
    except OSError as error:
        raise ConfigError(
            CACHE_KEY,
            f"{error.filename or folder}: {error.strerror or error}, while tokens were to be "
            f"read or written in {folder}"
            f"\n  fix: make room or give permission, or set {CACHE_KEY} to a different folder",
        ) from error
    if cache.num_bad > max_bad_records:
        raise too_many_bad_records(cache.num_bad, cache.first_bad)
    return cache


def _open_if_complete(folder: Path, blocks: BlockCache | None) -> TokenCache | None:
    if not (folder / "cache.npz").exists():
        return None
    try:
        return TokenCache(folder, blocks=blocks)
    except DamagedCacheError as damage:
        logger.warning("token cache %s is damaged (%s): made again", folder, damage)
        return None


Leases = Callable[[str], Lease]


def _leases(folder: Path) -> Leases:
    """Return the leases of this process on parts of a cache, by name.

    They save work, and nothing else depends on them: if two processes make a part, both write the
    same bytes under their own names, and the last one gives it its name.
    """
    return functools.cache(lambda name: Lease(folder / f"{name}.lease"))


@dataclass(frozen=True)
class _Todo:
    """The parts of a cache, as every process that makes some of them knows them."""

    recipe: TokenizationSpec
    parts: Sequence[Part]
    dtype: str
    wrong: dict[int, tuple[int, int]]
    """State of the indices of parts that are there and are to be made again."""
    max_bad_records: int

    @property
    def folder(self) -> Path:
        """Of the cache."""
        return self.parts[0].folder

    def is_done(self, part: Part) -> bool:
        """Return whether somebody has made the part."""
        try:
            return self.wrong.get(part.number) != _state(part)
        except FileNotFoundError:
            return False

    def left(self) -> list[Part]:
        """Return the parts that aren't made; of `max_documents`, only the needed ones."""
        most = self.recipe.entry.source.max_documents
        count, found, there = 0, [], set(os.listdir(self.folder))
        for part in self.parts:
            is_there = part.index.name in there
            if not (is_there and (part.number not in self.wrong or self.is_done(part))):
                found.append(part)
            elif most and not found:
                count += len(load_index(part).lengths)
                if count >= most:
                    break
        return found

    def runs(self) -> Iterator[tuple[str, list[Part]]]:
        """Yield the parts that are left by the name of their lease: some small files have one."""
        size = FILES_TOGETHER if self.parts[0].source else 1
        for number, run in itertools.groupby(self.left(), lambda part: part.number // size):
            yield str(number), list(run)


def _state(part: Part) -> tuple[int, int]:
    found = part.index.stat()
    return found.st_ino, found.st_mtime_ns


def _dtype(recipe: TokenizationSpec, items: Iterator[Any]) -> str:
    """Little-endian; wide enough for the vocabulary, and for `NO_LOSS` in conversations."""
    documents = (item for item in items if item and not isinstance(item, RecordError))
    is_wide = recipe.tokenizer.vocab_size > 1 << 16
    return "<u4" if is_wide or not isinstance(next(documents, ""), str) else "<u2"


def _make(
    recipe: TokenizationSpec,
    folder: Path,
    num_workers: int,
    check_all: bool,
    max_bad_records: int,
    blocks: BlockCache | None,
) -> TokenCache:
    """Make the missing parts, together with whoever else does, and open the cache."""
    damaged, was_there = folder / DAMAGED, (folder / "cache.npz").exists()
    noted = set(damaged.read_text("utf-8").split()) if damaged.exists() else set[str]()
    documents, _ = open_source(recipe)
    if isinstance(documents, TokenFiles):
        parts = [Part(folder, *place) for place in enumerate(documents.files)]
        dtype = ""
    else:
        parts = [Part(folder, number) for number in range(documents.parts)]
        items = itertools.chain.from_iterable(map(documents.read_part, range(documents.parts)))
        dtype = _dtype(recipe, items)
    wrong = {
        part.number: _state(part)
        for part in parts
        if is_damaged(part, check_all or str(part.number) in noted)
    }
    todo, leases = _Todo(recipe, parts, dtype, wrong, max_bad_records), _leases(folder)
    remove_left_over(folder)
    missing = len(todo.left())
    if missing:
        _tokenize(todo, leases, min(num_workers or count_cores(), missing), missing)
    # of a new cache: another process that was faster may have joined it
    is_wrong = was_there and (missing or check_all or LENGTHS in noted)
    try:
        if is_wrong or _open_if_complete(folder, blocks) is None:
            with leases(JOIN):
                if is_wrong or _open_if_complete(folder, blocks) is None:
                    join_parts(recipe, todo.parts)
        cache = TokenCache(folder, blocks=blocks)
    except DamagedCacheError as damage:  # someone else writes here, or the disk is failing
        raise ConfigError(CACHE_KEY, f"{folder}: {damage}\n  fix: delete the folder") from damage
    damaged.unlink(missing_ok=True)
    return cache


def _tokenize(todo: _Todo, leases: Leases, num_workers: int, missing: int) -> None:
    entry, total = todo.recipe.entry, len(todo.parts)
    name = f"{entry.name} for validation" if entry.key.startswith("validation") else entry.name
    done = f", {total - missing} of {total} parts are there" if missing < total else ""
    logger.info("tokenizing %s by %s%s", name, numbered(num_workers, "process", "es"), done)
    logger.debug("into %s", todo.folder)
    if multiprocessing.current_process().daemon:  # it has no children
        num_workers = 1
    context = multiprocessing.get_context("spawn")  # not forked: a rank has threads
    # in memory that they share: 1 if one has failed, which ends all; then the bytes and the tokens
    # that each of them has done
    counts = context.RawArray("q", 1 + 2 * num_workers)
    with _shown(name, todo, counts):
        # no pool: its locks would be left behind by a Ctrl-C, which ends this process at once
        workers = [_start(context, todo, counts, number) for number in range(1, num_workers)]
        try:
            unused = _work(todo, leases, counts, 0)
            for _, answers in workers:
                if isinstance(answer := answers.recv(), BaseException):
                    raise answer
                unused += answer
            # the rows of the part for validation are those of the training, which says it
            if unused and not entry.is_held_out:
                logger.info("%s: %s", name, note_of_unused(unused))
        except BaseException as error:
            counts[0] = 1
            if not isinstance(error, EOFError):
                raise
            what = "a process that tokenized was killed: for want of memory?"
            fix = "meshwright tokenize --workers 1; finished parts are kept"
            raise ConfigError(CACHE_KEY, f"{what}\n  fix: {fix}") from error
        finally:
            for process, answers in workers:
                answers.close()  # or one whose long error nobody reads would wait for ever
                process.join()
        while todo.left():  # others make them; or they are gone, and it is done here
            time.sleep(POLL_S)
            _work(todo, leases, counts, 0)


def _start(context: SpawnContext, todo: _Todo, counts: Any, worker: int) -> tuple[Any, Connection]:
    """Start a process that makes parts; return it and where its error, or what it has left unused,
    comes from."""
    answers, answer = context.Pipe(duplex=False)
    given = (os.getpid(), todo, counts, worker, answer)
    process = context.Process(target=_work_apart, args=given)
    process.start()
    answer.close()  # or its end wouldn't be noticed
    return process, answers


def _work_apart(parent: int, todo: _Todo, counts: Any, worker: int, answer: Connection) -> None:
    die_with_parent(parent)
    found: Counter[str] | BaseException
    try:
        found = _work(todo, _leases(todo.folder), counts, worker)
    except BaseException as error:  # Ctrl-C comes to this process as well
        error.add_note("".join(traceback.format_exception(error)))  # it is lost on the way
        found = error
    with suppress(BrokenPipeError):  # a different error came first
        answer.send(found)


def _work(todo: _Todo, leases: Leases, counts: Any, worker: int) -> Counter[str]:
    """Make parts until none is left that nobody has leased; return what their documents have that
    nothing uses."""
    documents, encoder = open_source(todo.recipe)
    unused = documents.unused
    unused.clear()  # whoever started with a look at the first document

    def advance(num_bytes: int, num_tokens: int) -> None:
        counts[1 + 2 * worker] += num_bytes
        counts[2 + 2 * worker] += num_tokens

    has_made = True
    while has_made:
        has_made = False
        for name, run in todo.runs():
            if counts[0]:
                return Counter()
            if all(map(todo.is_done, run)) or not leases(name).take():
                continue
            has_made = True
            try:
                for part in run:
                    if not todo.is_done(part):  # somebody may have made it before the lease
                        write_part(todo.recipe, part, todo.dtype, todo.max_bad_records, advance)
            except BaseException:
                counts[0] = 1
                raise
            finally:
                with suppress(OSError):  # as above
                    leases(name).give_back()
            if todo.recipe.entry.source.max_documents:
                break  # fewer may be left than were
    return unused + encoder.unread


@contextmanager
def _shown(name: str, todo: _Todo, counts: Any) -> Iterator[None]:
    """Show how far the making is: a bar on a terminal, lines elsewhere; at the end the sum."""
    total, start = len(todo.parts), time.perf_counter()
    at_first = total - len(todo.left())
    bar = tqdm(total=total, initial=at_first, unit="part", desc=name, disable=None)

    def rates() -> str:
        seconds = max(time.perf_counter() - start, 1e-3)
        mb, tokens = sum(counts[1::2]) / 1e6 / seconds, sum(counts[2::2]) / seconds
        return f"{mb:,.1f} MB/s" + (f", {tokens:,.0f} tokens/s" if tokens else "")

    def far() -> str:
        done, seconds = total - len(todo.left()), time.perf_counter() - start
        made = done - at_first
        if not bar.disable:  # counted anew, as other nodes make parts as well
            bar.n = done
            bar.set_postfix_str(rates())
            return ""
        eta = f", about {seconds / made * (total - done):,.0f} s left" if made else ""
        return f"{done} of {total} parts, {rates()}{eta}"

    with bar, busy(f"tokenizing {name}", far, None if bar.disable else POLL_S):
        yield
        far()
    seconds = time.perf_counter() - start
    logger.info("tokenized %s in %.1f s: %s here", name, seconds, rates())
