"""The tables and samples that `meshwright data` prints. Imports numpy, so after its first word."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.manifest import DamagedError
from meshwright.config.job_config import JobConfig
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.named_sources import entries, is_streamed, validation_entries
from meshwright.datasets.opening import recipe_of
from meshwright.datasets.samples import Sample, SampleRules
from meshwright.datasets.stream import Cursor, OpenSource, draw_samples, find_samples
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.locate import document_tokens, locate
from meshwright.datasets.token_cache.tokenizing import POLL_S, cache_folder, cache_root
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.system.errors import ConfigError, check, config_error
from meshwright.system.lease import LEASE_S, Lease, describe, is_here
from meshwright.system.log import align

Row = Sequence[str]


def _print_table(rows: Iterable[Row]) -> None:
    print(align(list(rows)), end="\n\n")


def print_overview(config: JobConfig, sources: Sequence[OpenSource], steps: int) -> None:
    """Print what each source holds, the lengths of its documents, and where its tokens are.

    Args:
        steps: of the stage.
    """
    _print_table(_contents(config, sources, steps))
    _print_table(_lengths(sources))
    for source in sources:
        if isinstance(source, CachedSource):
            print(f"{source.entry.name}: {source.cache.folder}")
        else:
            print(f"{source.entry.name}: streamed in {source.num_shards} shards")


def _contents(config: JobConfig, sources: Sequence[OpenSource], steps: int) -> Iterator[Row]:
    """Yield a row for each source, under its heading."""
    training = config.training
    whole = sum(source.entry.weight for source in sources)
    batch = training.global_batch_size
    samples = steps * batch if batch > 0 else None
    yield "source", "documents", "tokens", "bytes/token", "left out", "share", "epochs"
    for source in sources:
        share = source.entry.weight / whole
        if not isinstance(source, CachedSource):
            unknown = ("streamed", "?", "?", "?")
            yield source.entry.name, *unknown, f"{share:.2%}", "?"
            continue
        cache = source.cache
        per_epoch = source.samples_per_epoch(config.training.seq_len + 1)
        yield (
            source.entry.name,
            f"{cache.num_documents:,}",
            f"{cache.num_tokens:,}",
            f"{cache.num_bytes / cache.num_tokens:.2f}",
            f"{cache.num_bad:,}",
            f"{share:.2%}",
            f"{samples * share / per_epoch:.2f}" if samples else "?",
        )


POINTS = (0.1, 0.5, 0.9, 0.99)
"""Parts of the documents that are at most so long."""

BLOCKS_LOOKED_AT = 256
"""Of 1024 documents each, evenly spread: more say no more of the lengths."""


def _lengths(sources: Sequence[OpenSource]) -> Iterator[Row]:
    """Yield the lengths of documents of each cached source, under a heading."""
    yield "tokens of a document", *(f"{point:.0%}" for point in POINTS), "longest seen"
    for source in sources:
        if isinstance(source, CachedSource):
            lengths = _some_lengths(source.cache)
            found = np.quantile(lengths, POINTS, method="lower").tolist()
            yield source.entry.name, *(f"{n:,}" for n in found), f"{lengths.max():,}"


def _some_lengths(cache: TokenCache) -> np.ndarray:
    num_blocks = len(cache.block_starts) - 1
    step = -(-num_blocks // BLOCKS_LOOKED_AT)
    return np.concatenate([cache.lengths(block) for block in range(0, num_blocks, step)])


Found = Iterator[tuple[str, Sample]]


def print_samples(found: Found, tokenizer: Tokenizer) -> None:
    """Print samples as text, each under its place."""
    for name, sample in found:
        print(f"--- {name}")
        tokens = sample.tokens.tolist()
        print(tokenizer.decode(tokens[: len(tokens) - sample.padding]))


def _rules(config: JobConfig) -> SampleRules:
    training = config.training
    # of bad records, the job decides
    return SampleRules(training.seq_len + 1, training.seed, max_bad_records=1 << 62)


def _cursors(
    config: JobConfig, sources: Sequence[OpenSource], stage: int
) -> Iterator[tuple[int, Cursor]]:
    """Yield the places in the data that checkpoints of a stage hold, each after its step."""
    if stage == 1:
        yield 0, Cursor()
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    here = [(source.entry.name, source.content) for source in sources]
    for step in listing.saved_steps(folder):
        try:
            manifest = integrity.inspect(listing.step_folder(folder, step))
        except DamagedError:  # or deleted by the job that runs; another one tells a place as well
            continue
        # a place in other data is none in this
        if manifest.get("stage", 1) == stage and [*manifest["data_content"].items()] == here:
            yield step, Cursor.from_json(manifest["data"])


def of_step(config: JobConfig, sources: Sequence[OpenSource], step: int, stage: int) -> Found:
    """Yield the samples of a step, in their order in the global batch."""
    training = config.training
    batch = training.global_batch_size
    fix = "set it: the samples of a step depend on it"
    check(batch > 0, "training.global_batch_size", batch, "follows the number of ranks", fix)
    places = [place for place in _cursors(config, sources, stage) if place[0] < step]
    rule = f"no checkpoint of stage {stage} before it tells its place in the data"
    check(bool(places), "--step", step, rule, "name a later step, or use --samples")
    saved, before = places[-1]
    first = before.sample + (step - 1 - saved) * batch
    drawn = draw_samples(sources, before, first, batch, _rules(config))
    for index, (number, place, sample) in enumerate(drawn):
        yield f"step {step}, sample {index}: {sources[number].entry.name} {place}", sample


def of_source(
    config: JobConfig, sources: Sequence[OpenSource], stage: int, name: str, first: str, last: str
) -> Found:
    """Yield samples of one source. Of a streamed one, everything since the last checkpoint before
    them is read again."""
    source = named_source("--samples", sources, name)
    is_range = first.isdecimal() and last.isdecimal() and int(first) <= int(last)
    check(is_range, "--samples", f"{first} {last}", "are not two indices, the first one first")
    number, begin = sources.index(source), int(first)
    before = (0, Cursor())
    for _, cursor in _cursors(config, sources, stage):
        if cursor.counts and cursor.counts[number] <= begin:
            before = cursor.counts[number], cursor
    found = find_samples(source, begin, int(last), _rules(config), before)
    for index, sample in enumerate(found, begin):
        yield f"sample {index} of {name}", sample


def print_document(
    config: JobConfig,
    sources: Sequence[OpenSource],
    tokenizer: Tokenizer,
    name: str,
    number: str,
) -> None:
    """Print a document of a cached source: its place in the data, and its tokens as text."""
    source = named_source("--documents", sources, name)
    if not isinstance(source, CachedSource):
        fix = 'set its dataset_mode = "cached", or print samples: --samples'
        raise config_error("--documents", name, "is streamed, so documents have no numbers", fix)
    count = source.cache.num_documents
    is_one = number.isdecimal() and int(number) < count
    check(is_one, "--documents", number, f"is not a number from 0 to {count - 1}")
    document = source.cache.document(int(number))
    tokens = document_tokens(source.cache, document)
    where = locate(recipe_of(source.entry, config), source.cache, document)
    print(f"--- {name} {number}: {where}, {len(tokens):,} tokens")
    print(tokenizer.decode(tokens.tolist()))


def named_source(option: str, sources: Sequence[OpenSource], name: str) -> OpenSource:
    """Return the source of that name; raise `ConfigError` if there is none."""
    names = [source.entry.name for source in sources]
    check(name in names, option, name, f"is not one of {', '.join(names)}")
    return sources[names.index(name)]


def print_caches(config: JobConfig, *, has_job: bool) -> None:
    """Print a row for each cache in the folder, and which the job reads, if there is one."""
    root = cache_root(config.training.token_cache_folder)
    rows: list[Row] = [(f"cache in {root}", "GB", "made", "state", "of this config")]
    job = (*entries(config.training, "training"), *validation_entries(config)) if has_job else ()
    used = {
        cache_folder(recipe_of(entry, config), root).name: entry.name
        for entry in job
        if not is_streamed(entry)
    }
    for folder in sorted(root.glob("*/")):
        if folder.name == "blocks" or not any(folder.glob("*.npz")):
            continue
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        made = time.strftime("%Y-%m-%d", time.localtime(folder.stat().st_mtime))
        state = "complete" if (folder / "cache.npz").exists() else "unfinished"
        rows.append((folder.name, f"{size / 1e9:,.3f}", made, state, used.get(folder.name, "")))
    _print_table(rows)


def remove(config: JobConfig, name: str) -> None:
    """Remove one cache: it can be made again, and a job that reads it would stop.

    Raises:
        ConfigError: if there is none of that name, or a job writes to it.
    """
    root = cache_root(config.training.token_cache_folder)
    folder = root / name
    is_one = folder.parent == root and (any(folder.glob("*.npz")) or name == "blocks")
    if not is_one or not folder.is_dir():
        raise config_error("--remove", name, f"is no cache in {root}", "see --caches for the names")
    with ExitStack() as held:
        _lease_all([*folder.glob("*.lease")], held)
        # first the file without which it is no cache: an interruption leaves none that looks whole
        (folder / "cache.npz").unlink(missing_ok=True)
        shutil.rmtree(folder)
    print(f"removed {folder}")


def _lease_all(files: Sequence[Path], held: ExitStack) -> None:
    """Take the leases on parts of a cache if their owners are gone: they may be on another node,
    so touches of the files are waited for, of all at once.

    Raises:
        ConfigError: if one isn't gone.
    """
    leases = [Lease(file) for file in files]
    is_first = True
    while leases := [lease for lease in leases if not _take(lease, held)]:
        for lease in leases:
            owner = lease.owner
            if lease.was_touched or (owner and is_here(owner)):
                who = describe(owner) if owner else "unknown"
                what = f"a job is writing to {lease.file.parent}: {who}"
                fix = "stop it, or wait until it has ended"
                raise ConfigError("--remove", f"{what}\n  fix: {fix}")
        if is_first:
            what = f"looking for {LEASE_S:.0f} s at most whether a job writes to {files[0].parent}"
            print(what, file=sys.stderr)
            is_first = False
        time.sleep(POLL_S)


def _take(lease: Lease, held: ExitStack) -> bool:
    if is_ours := lease.take():
        held.callback(lease.give_back)
    return is_ours
