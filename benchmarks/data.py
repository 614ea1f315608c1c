"""Data: how fast it is tokenised and read, what it takes of memory, what a late resume costs.

    python benchmarks/data.py rates --megabytes 64    against datasets.map and torch's DataLoader
    python benchmarks/data.py memory --gigabytes 1
    python benchmarks/data.py resume
    python benchmarks/data.py mixture
    python benchmarks/data.py share outputs/debug_model/metrics.jsonl

`rates` reads the Python files of this environment. Both sides tokenise them with the same
sentencepiece model, BOS and EOS around each, lay them end to end and cut them into samples of 513;
then both give batches of 8 samples in random order, as int64 tensors. Each figure is the best of
three; sides and numbers of processes take turns.
"""

import argparse
import itertools
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from timeit import timeit

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

from meshwright.config.training import Source
from meshwright.datasets.cached_samples import CachedSamples
from meshwright.datasets.documents import Documents, Entry, IndexedDocuments
from meshwright.datasets.loader import BatchShape, Loader
from meshwright.datasets.opening import CachedSource
from meshwright.datasets.order import Mixture
from meshwright.datasets.sample import Encoder, SampleRules
from meshwright.datasets.sample_stream import Cursor, SampleStream
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import build_tokenizer

TOKENIZER = str(Path(__file__).parents[1] / "assets/tokenizers/python_2k.model")
LENGTH = 513  # tokens of a sample
BATCH = 8  # samples


def write_corpus(path: Path, megabytes: int) -> int:
    """JSON lines, a document each, of this environment's Python files; their number of bytes."""
    folders = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]
    files = itertools.chain.from_iterable(sorted(Path(f).rglob("*.py")) for f in folders)
    size = 0
    with open(path, "w") as file:
        for source in files:
            text = source.read_text("utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size > megabytes * 1e6:
                break
    return size


def best_of_three(*functions: Callable[[int], float]) -> list[float]:
    """Seconds of each, which take turns; each is told which turn it is."""
    times = [[function(turn) for function in functions] for turn in range(3)]
    return [min(column) for column in zip(*times, strict=True)]


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def rates(megabytes: int) -> None:
    """Tokenising and reading, side by side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = write_corpus(folder / "corpus.jsonl", megabytes)
        datasets.disable_progress_bars()
        datasets.config.HF_DATASETS_CACHE = folder / "hf"
        os.environ["HF_DATASETS_CACHE"] = str(folder / "hf")  # for processes
        rows = datasets.load_dataset(
            "json", data_files=[str(folder / "corpus.jsonl")], split="train"
        )
        print(f"corpus: {num_bytes / 1e6:.0f} MB, {len(rows)} documents; samples of {LENGTH}")
        source = Source(dataset="json", dataset_path=str(folder / "corpus.jsonl"))
        recipe = TokenizationSpec(Entry("training", "corpus", source), TOKENIZER)

        def ours(num_workers: int) -> Callable[[int], float]:
            return lambda turn: timed(
                lambda: open_cache(
                    recipe, folder / f"ours {num_workers} {turn}", num_workers=num_workers
                )
            )

        tokenized = {}

        def theirs(num_proc: int) -> Callable[[int], float]:
            def run(turn: int) -> float:
                cache = str(folder / f"theirs-{num_proc}-{turn}.arrow")
                start = time.perf_counter()
                tokenized[num_proc] = rows.map(
                    pack,
                    batched=True,
                    remove_columns=["text"],
                    num_proc=num_proc if num_proc > 1 else None,
                    cache_file_name=cache,
                )
                return time.perf_counter() - start

            return run

        open_cache(recipe, folder / "warm up", num_workers=1)
        seconds = best_of_three(ours(1), theirs(1), ours(2), theirs(2))
        cache = open_cache(recipe, folder / "warm up")
        for label, second in zip(
            ("ours, 1 process", "datasets.map, 1", "ours, 2 processes", "datasets.map, 2"),
            seconds,
            strict=True,
        ):
            print(
                f"tokenise  {label:18} {num_bytes / second / 1e6:6.1f} MB/s "
                f"{cache.num_tokens / second / 1e6:6.2f} M tokens/s"
            )
        print(f"ratio 1: {seconds[1] / seconds[0]:.2f}, 2: {seconds[3] / seconds[2]:.2f}")
        read_rates(CachedSource(recipe.entry, cache), tokenized[1])


def pack(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """What users write for `datasets.map`: tokenise, join, cut; the rest of a batch is dropped."""
    tokenizer = build_tokenizer(TOKENIZER)
    joined: list[int] = []
    for text in rows["text"]:
        joined += [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    end = len(joined) // LENGTH * LENGTH
    return {"ids": [joined[i : i + LENGTH] for i in range(0, end, LENGTH)]}


def read_rates(source: CachedSource, theirs: datasets.Dataset) -> None:
    """Batches of random samples, as tensors."""
    theirs = theirs.with_format("torch")
    num_batches = min(len(theirs), source.cache.num_tokens // LENGTH) // BATCH

    def ours(turn: int) -> float:
        shape = BatchShape(BATCH, 1, 0, 1)
        order = SampleStream(
            [source],
            [1],
            Cursor(),
            SampleRules(LENGTH, turn, max_epochs=1),
            batch=BATCH,
            slots=shape.slots,
        )
        loader = Loader(order, shape, mask_documents=False, pin_memory=False)
        return timed(lambda: sum(1 for _ in itertools.islice(loader, num_batches)))

    def with_workers(num_workers: int) -> Callable[[int], float]:
        def run(turn: int) -> float:
            loader = DataLoader(
                theirs,
                BATCH,
                shuffle=True,
                num_workers=num_workers,
                generator=torch.Generator().manual_seed(turn),
            )
            return timed(lambda: sum(1 for _ in itertools.islice(loader, num_batches)))

        return run

    seconds = best_of_three(ours, with_workers(0), with_workers(2))
    labels = ("ours", "DataLoader, 0 workers", "DataLoader, 2 workers")
    for label, second in zip(labels, seconds, strict=True):
        print(f"read      {label:22} {num_batches * BATCH * LENGTH / second / 1e6:6.2f} M tokens/s")
    print(f"ratio to the better: {min(seconds[1:]) / seconds[0]:.1f}")


class RandomTokens(TokenizationSpec):
    """Documents of random tokens, to make a large cache quickly."""

    def open(self, streamed: bool) -> Documents:
        return IndexedDocuments(self.size, str)

    def encoder(self) -> Encoder:
        rng = np.random.default_rng(0)

        class Random(Encoder):
            def __init__(self) -> None:
                pass

            def encode(self, document: object) -> np.ndarray:
                return rng.integers(0, 2048, rng.integers(1, 2048), np.uint32)

        return Random()

    def identity(self) -> str:
        return str(self.size)

    @property
    def size(self) -> int:
        """Number of documents."""
        return int(self.entry.name)


def unshared_mib() -> float:
    """Memory that this process shares with no other and no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def memory(gigabytes: float) -> None:
    """What reading all of a large cache in random order adds."""
    with tempfile.TemporaryDirectory() as name:
        size = int(gigabytes * 2**30 / 2 / 1024)  # two bytes a token, 1024 a document
        recipe = RandomTokens(Entry("training", str(size), Source()), TOKENIZER)
        folder = open_cache(recipe, Path(name), num_workers=1).folder
        before = unshared_mib()
        samples = CachedSamples(TokenCache(folder), 2049, seed=0)
        start = time.perf_counter()
        for index in range(samples.samples_per_epoch):
            samples.read(index)
        seconds = time.perf_counter() - start
        tokens = samples.samples_per_epoch * 2049
        print(f"cache of {2 * tokens / 2**30:.2f} GiB, {size} documents, read once in random order")
        print(f"unshared memory: {unshared_mib() - before:.1f} MiB more than before")
        print(f"{tokens / seconds / 1e6:.1f} M tokens/s in one thread")


def resume() -> None:
    """To the first batch, from a cursor early and late in the same data."""
    with tempfile.TemporaryDirectory() as name:
        recipe = RandomTokens(Entry("training", "20000", Source()), TOKENIZER)
        source = CachedSource(recipe.entry, open_cache(recipe, Path(name), num_workers=1))
        shape = BatchShape(BATCH, 1, 0, 1)

        def first_batch(sample: int) -> Callable[[int], float]:
            share = [sample * 3 // 4, sample - sample * 3 // 4]

            def run(turn: int) -> float:
                start = time.perf_counter()
                order = SampleStream(
                    [source, CachedSource(Entry("training", "b", Source()), source.cache)],
                    [0.75, 0.25],
                    Cursor(sample, tuple(share)),
                    SampleRules(LENGTH, seed=0),
                    batch=BATCH,
                    slots=shape.slots,
                )
                loader = Loader(order, shape, mask_documents=False, pin_memory=False)
                next(loader)
                seconds = time.perf_counter() - start
                loader.close()
                return seconds

            return run

        early, late = best_of_three(first_batch(12), first_batch(1_000_000_000))
        print(f"first batch at sample 12: {early * 1e3:.2f} ms, at 10^9: {late * 1e3:.2f} ms")


def mixture() -> None:
    """What it costs to choose the source of a sample, which every rank does for every sample."""
    draws = 100_000
    for sources in (1, 3, 10, 40):
        rng = np.random.default_rng(0)
        chosen = Mixture([round(weight, 3) for weight in rng.random(sources) + 0.001])
        [seconds] = best_of_three(lambda _, draw=chosen.draw: timeit(draw, number=draws))
        print(f"{sources:2} sources: {seconds / draws * 1e6:.2f} us a draw")


def share(metrics: Path) -> None:
    """Of the time of a finished job's steps, what they waited for data."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    waited, taken = (sum(row[key] for row in records) for key in ("time/data_s", "time/step_s"))
    print(f"data: {100 * waited / taken:.4f} % of {len(records)} logged steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rates").add_argument("--megabytes", type=int, default=64)
    commands.add_parser("memory").add_argument("--gigabytes", type=float, default=1)
    commands.add_parser("resume")
    commands.add_parser("mixture")
    commands.add_parser("share").add_argument("metrics", type=Path)
    options = parser.parse_args()
    if options.command == "rates":
        rates(options.megabytes)
    elif options.command == "memory":
        memory(options.gigabytes)
    elif options.command == "resume":
        resume()
    elif options.command == "mixture":
        mixture()
    else:
        share(options.metrics)


if __name__ == "__main__":
    main()
