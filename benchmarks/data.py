"""Data: how fast it is tokenised and read, and how long a job waited for it.

    python benchmarks/data.py rates --megabytes 64    beside datasets.map, DataLoader
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

import datasets
import torch
from torch.utils.data import DataLoader

from meshwright.config.training import Source
from meshwright.datasets.documents import Entry
from meshwright.datasets.loader import BatchShape, Loader
from meshwright.datasets.opening import CachedSource
from meshwright.datasets.sample import SampleRules
from meshwright.datasets.sample_stream import Cursor, SampleStream
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


def share(metrics: Path) -> None:
    """Of the time of a finished job's steps, what they waited for data."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    waited, taken = (sum(row[key] for row in records) for key in ("time/data_s", "time/step_s"))
    print(f"data: {100 * waited / taken:.4f} % of {len(records)} logged steps")


def main() -> None:
    """Measure, or read a finished job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rates").add_argument("--megabytes", type=int, default=64)
    commands.add_parser("share").add_argument("metrics", type=Path)
    options = parser.parse_args()
    if options.command == "rates":
        rates(options.megabytes)
    else:
        share(options.metrics)


if __name__ == "__main__":
    main()
