"""Data: how fast it is tokenised and read, and how long a job waited for it.

    python benchmarks/data.py rates --megabytes 64    beside datasets.map, DataLoader
    python benchmarks/data.py share outputs/debug_model/metrics.jsonl

`rates` reads the Python files of this environment. Both sides tokenise them with the same
sentencepiece model, BOS and EOS around each, lay them end to end and cut them into samples of 513;
then both give batches of 8 samples in random order, as int64 tensors. Each figure is the best of
three; sides and numbers of processes take turns.
"""

import argparse
import functools
import itertools
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader

from meshwright.config.training import Source
from meshwright.datasets.encoding import SampleRules
from meshwright.datasets.files import Entry
from meshwright.datasets.loader import BatchShape, Loader
from meshwright.datasets.opening import CachedSource
from meshwright.datasets.stream import Cursor, SampleStream
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import build_tokenizer

TOKENIZER = str(Path(__file__).parents[1] / "assets/tokenizers/python_2k.model")
LENGTH = 513  # tokens of a sample
BATCH = 8  # samples


def write_corpus(path: Path, megabytes: int) -> int:
    """Write this environment's Python files as JSON lines, one document each; return the bytes."""
    folders = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]
    files = itertools.chain.from_iterable(sorted(Path(f).rglob("*.py")) for f in folders)
    size = 0
    with path.open("w") as file:
        for source in files:
            text = source.read_text("utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size > megabytes * 1e6:
                break
    return size


def best_of_three(functions: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Return the seconds of each function, which is told its turn; they take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(3):
        for name, function in functions.items():
            start = time.perf_counter()
            function(turn)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def pack(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Tokenise, join and cut, as users write it for `datasets.map`; the rest of a batch is lost."""
    tokenizer = build_tokenizer(TOKENIZER)
    joined: list[int] = []
    for text in rows["text"]:
        joined += [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    end = len(joined) // LENGTH * LENGTH
    return {"ids": [joined[i : i + LENGTH] for i in range(0, end, LENGTH)]}


def rates(folder: Path, megabytes: int) -> None:
    """Tokenise and read, side by side."""
    corpus = folder / "corpus.jsonl"
    num_bytes = write_corpus(corpus, megabytes)
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "hf")  # for processes
    rows = datasets.load_dataset("json", data_files=[str(corpus)], split="train")
    print(f"corpus: {num_bytes / 1e6:.0f} MB, {len(rows)} documents; samples of {LENGTH}")
    source = Source(dataset="json", dataset_path=str(corpus))
    recipe = TokenizationSpec(Entry("training", "corpus", source), TOKENIZER)

    def ours(turn: int, processes: int) -> None:
        open_cache(recipe, folder / f"ours {processes} {turn}", num_workers=processes)

    def theirs(turn: int, processes: int) -> datasets.Dataset:
        return rows.map(
            pack,
            batched=True,
            remove_columns=["text"],
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(folder / f"theirs-{processes}-{turn}.arrow"),
        )

    cache = open_cache(recipe, folder / "warm up", num_workers=1)
    ways = {"ours": ours, "datasets.map": theirs}
    found = best_of_three(
        {
            f"{name}, {n}": functools.partial(function, processes=n)
            for n in (1, 2)
            for name, function in ways.items()
        }
    )
    for name, seconds in found.items():
        rate, tokens = num_bytes / seconds / 1e6, cache.num_tokens / seconds / 1e6
        print(f"tokenise  {name:22} {rate:6.1f} MB/s {tokens:6.2f} M tokens/s")
    read_rates(CachedSource(recipe.entry, cache), theirs(0, processes=1))


def read_rates(source: CachedSource, theirs: datasets.Dataset) -> None:
    """Read batches of random samples, as tensors."""
    theirs = theirs.with_format("torch")
    num_batches = min(len(theirs), source.cache.num_tokens // LENGTH) // BATCH

    def our_loader(turn: int) -> Loader:
        shape = BatchShape(BATCH, 1, 0, 1)
        rules = SampleRules(LENGTH, turn, max_epochs=1)
        order = SampleStream([source], [1], Cursor(), rules, batch=BATCH, slots=shape.slots)
        return Loader(order, shape, mask_documents=False, pin_memory=False)

    def their_loader(turn: int, workers: int) -> DataLoader:
        seed = torch.Generator().manual_seed(turn)
        return DataLoader(theirs, BATCH, shuffle=True, num_workers=workers, generator=seed)

    def read(turn: int, make: Callable[[int], Iterable[object]]) -> int:
        return sum(1 for _ in itertools.islice(make(turn), num_batches))

    makers: dict[str, Callable[[int], Iterable[object]]] = {"ours": our_loader}
    for workers in (0, 2):
        makers[f"DataLoader, {workers} workers"] = functools.partial(their_loader, workers=workers)
    found = best_of_three({k: functools.partial(read, make=make) for k, make in makers.items()})
    for name, seconds in found.items():
        tokens = num_batches * BATCH * LENGTH
        print(f"read      {name:22} {tokens / seconds / 1e6:6.2f} M tokens/s")


def share(metrics: Path) -> None:
    """Print the share of a finished job's steps that they waited for data."""
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
    if options.command == "share":
        share(options.metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        rates(Path(folder), options.megabytes)


if __name__ == "__main__":
    main()
