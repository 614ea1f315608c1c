"""Data: how fast it is read, tokenised, sampled and indexed, beside `datasets` and Megatron-LM.

    python -m benchmarks.data rows --megabytes 200 --kind parquet       files to documents
    python -m benchmarks.data tokens --megabytes 32                     documents to tokens
    python -m benchmarks.data samples --megabytes 32                    tokens to random batches
    python -m benchmarks.data index --files 5000                        files of tokens of others
    python -m benchmarks.data share outputs/debug_model/metrics.jsonl   of a finished job

Documents are files of Python's standard library, again and again. Each way runs in a process of its
own, in turns, with one worker. Processor seconds change less by other load than seconds do; the
peak of memory is above that of the process before the work. Megatron-LM needs
`pip install --no-deps megatron-core` and `transformers`.
"""

import argparse
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshwright.config.section import BYTES
from meshwright.config.training import Source
from meshwright.datasets.encoding import TokenizationSpec
from meshwright.datasets.files import Entry
from meshwright.datasets.rows import LocalDocuments
from meshwright.datasets.storage import stat
from meshwright.datasets.token_cache.cache import TokenCache
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import build_tokenizer

KINDS = ("json", "parquet", "text")
LENGTH, BATCH = 513, 8
"""Tokens of a sample; samples of a batch."""

Way = Callable[[Path], Iterator[int]]
"""Does the work with the files of a folder; yields how much is done: at first 0, when it is ready
to begin."""


def write_corpus(folder: Path, kind: str, megabytes: int) -> None:
    """Write documents in one file; Parquet in a single row group, as pyarrow does."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts, size = list[str](), 0
    for number, file in enumerate(itertools.cycle(files)):
        texts.append(f"# {number}\n{file.read_text('utf-8', 'replace')}")  # no two are equal
        size += len(texts[-1])
        if size > megabytes * 1e6:
            break
    path = folder / f"corpus.{kind}"
    if kind == "json":
        with path.open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    elif kind == "text":
        path.write_text("\n".join(texts))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), path)


def train_bpe(folder: Path) -> None:
    """Train a byte-level tokenizer.json of 8,192 ids on some files of the standard library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(file) for file in sorted(Path(os.__file__).parent.glob("[a-f]*.py"))], trainer)
    made.save(str(folder / "tokenizer.json"))


def write_tokens(folder: Path, files: int, tokens: int) -> None:
    """Write shards of random bytes as numpy arrays, each document with an EOS."""
    rng = np.random.default_rng(0)
    (folder / "tokens").mkdir()
    for number in range(files):
        ids = rng.integers(0, 256, tokens).astype("<u2")
        ids[rng.integers(0, tokens, tokens // 500)] = ids[-1] = 257
        np.save(folder / f"tokens/{number:05}.npy", ids)


def corpus_of(folder: Path) -> tuple[str, Path]:
    """Return the kind and the path of the documents."""
    (path,) = folder.glob("corpus.*")
    return path.suffix[1:], path


def rows(folder: Path) -> Iterator[int]:
    """Documents by our readers."""
    kind, path = corpus_of(folder)
    separator = "\n" if kind == "text" else ""
    source = Source(dataset=kind, dataset_path=str(path), dataset_separator=separator)
    yield 0
    documents = LocalDocuments(Entry("training", kind, source), [stat(str(path))])
    for part in range(documents.parts):
        for item in documents.read_part(part):
            assert isinstance(item, str)
            yield 1


def loaded(folder: Path) -> Any:
    """Return the documents as `datasets` has them, which converts them to a file of Arrow first."""
    import datasets

    datasets.disable_progress_bars()
    kind, path = corpus_of(folder)
    cache = str(folder / f"hf-{os.getpid()}")
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache)


def rows_of_map(folder: Path) -> Iterator[int]:
    """Documents as `datasets.map` passes them to a function, in batches."""
    import datasets  # noqa: F401  not timed

    yield 0
    found = loaded(folder)
    names = found.column_names
    mapped = found.map(lambda b: {"n": [1] * len(b["text"])}, batched=True, remove_columns=names)
    yield from (len(batch["n"]) for batch in mapped.iter(1000))


def tokenised(folder: Path, name: str) -> TokenCache:
    """Return a token cache of the documents; it is made, if it is not there."""
    kind, path = corpus_of(folder)
    entry = Entry("training", kind, Source(dataset=kind, dataset_path=str(path)))
    recipe = TokenizationSpec(entry, str(folder / "tokenizer.json"))
    return open_cache(recipe, folder / name, num_workers=1)


def tokens(folder: Path) -> Iterator[int]:
    """Tokens in a cache."""
    yield 0
    yield tokenised(folder, f"cache-{os.getpid()}").num_tokens


def tokens_of_map(folder: Path) -> Iterator[int]:
    """Tokens as the course of Hugging Face makes them."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch
    yield 0
    mapped = loaded(folder).map(
        lambda batch: {"ids": [[*found.ids, 0] for found in encode(batch["text"])]},
        batched=True,
        remove_columns=["text"],
    )
    yield sum(len(ids) for some in mapped.with_format("numpy").iter(1000) for ids in some["ids"])


def tokens_of_megatron(folder: Path) -> Iterator[int]:
    """Tokens as `tools/preprocess_data.py` of Megatron-LM makes them: its tokenizer, its writer."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer

    made = HuggingFaceTokenizer(str(folder), eos_token="<|endoftext|>")
    to = folder / f"megatron-{os.getpid()}"
    builder = IndexedDatasetBuilder(str(to.with_suffix(".bin")), DType.optimal_dtype(8192))
    yield 0
    for line in corpus_of(folder)[1].open():
        ids = [*made.text_to_ids(json.loads(line)["text"]), 0]
        builder.add_document(ids, [len(ids)])
        yield len(ids)
    builder.finalize(str(to.with_suffix(".idx")))


def tokens_alone(folder: Path) -> Iterator[int]:
    """Tokens of texts in memory, one after the other: no way can be faster with this tokenizer."""
    encode = build_tokenizer(str(folder / "tokenizer.json")).encode
    texts = [json.loads(line)["text"] for line in corpus_of(folder)[1].open()]
    yield 0
    yield sum(len(encode(text)) + 1 for text in texts)


def samples(folder: Path) -> Iterator[int]:
    """Tokens of random samples as tensors, by our loader; the first batch is read before."""
    from meshwright.datasets.loader import BatchShape, Loader
    from meshwright.datasets.opening import CachedSource
    from meshwright.datasets.samples import SampleRules
    from meshwright.datasets.stream import Cursor, SampleStream

    source = CachedSource(Entry("training", "json", Source()), tokenised(folder, "cache"))
    shape, rules = BatchShape(BATCH, 1, 0, 1), SampleRules(LENGTH, 0, max_epochs=1)
    stream = SampleStream([source], [1], Cursor(), rules, batch=BATCH, slots=shape.slots)
    steps = Loader(stream, shape, mask_documents=False, pin_memory=False)
    next(steps)
    yield 0
    for _ in steps:
        yield BATCH * LENGTH


def samples_of_loader(folder: Path) -> Iterator[int]:
    """The same by torch's DataLoader without workers, of rows of `datasets`."""
    import datasets
    from torch.utils.data import DataLoader

    cache = tokenised(folder, "cache")
    ids = np.concatenate([np.fromfile(p, "<u2") for p in sorted(cache.folder.glob("*.tokens"))])
    whole = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64)
    batches = iter(
        DataLoader(
            datasets.Dataset.from_dict({"ids": list(whole)}).with_format("torch"),  # type: ignore[arg-type]
            BATCH,
            shuffle=True,
        )
    )
    next(batches)
    yield 0
    for batch in batches:
        yield batch["ids"].numel()


def index(folder: Path) -> Iterator[int]:
    """Files of tokens of others."""
    source = Source(dataset="tokens", dataset_path=str(folder / "tokens"))
    yield 0
    recipe = TokenizationSpec(Entry("training", "tokens", source), BYTES)
    open_cache(recipe, folder / f"cache-{os.getpid()}", num_workers=1)
    yield len(list((folder / "tokens").iterdir()))


WAYS: dict[str, dict[str, Way]] = {
    "rows": {"ours": rows, "datasets.map": rows_of_map},
    "tokens": {
        "ours": tokens,
        "datasets.map": tokens_of_map,
        "tokenizer alone": tokens_alone,
        "Megatron-LM": tokens_of_megatron,
    },
    "samples": {"ours": samples, "DataLoader": samples_of_loader},
    "index": {"ours": index},
}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_mib() -> float:
    """Return the peak of this process' memory: ru_maxrss begins with the peak of its parent."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def run_one(what: str, way: str, folder: Path) -> None:
    """Print the figures of one way."""
    work, count, first = WAYS[what][way](folder), 0, 0.0
    try:
        next(work)
    except ImportError as error:
        print(f"{what:8} {way:16} left out: no {error.name}", flush=True)
        return
    peak, used, start = peak_mib(), cpu_seconds(), time.perf_counter()
    for done in work:
        first = first or cpu_seconds() - used
        count += done
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    size = sum(path.stat().st_size for path in folder.glob("corpus.*")) / 1e6
    rate = f"{size / used:7.1f} MB/s " if what in ("rows", "tokens") else ""
    figures = f"in {seconds:7.2f} s, {used:7.2f} s of the processor (the first after {first:.3f})"
    per_s = f"{count / used:13,.0f}/s {rate}{peak_mib() - peak:5.0f} MiB"
    print(f"{what:8} {way:16} {count:11,} {figures} {per_s}", flush=True)


def share(metrics: Path) -> None:
    """Print the share of a finished job's steps that they waited for data."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    waited, taken = (sum(row[key] for row in records) for key in ("time/data_s", "time/step_s"))
    print(f"data: {100 * waited / taken:.4f} % of {len(records)} logged steps")


def main() -> None:
    """Measure all ways in turns, or read a finished job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*WAYS, "share"])
    parser.add_argument("metrics", type=Path, nargs="?", help="of a finished job")
    parser.add_argument("--kind", choices=KINDS, default="json", help="of rows")
    for flag, default in (("megabytes", 32), ("files", 1000), ("tokens", 5000), ("rounds", 2)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "share":
        share(given.metrics)
        return
    if given.one:
        run_one(given.what, given.one[0], Path(given.one[1]))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "index":
            write_tokens(folder, given.files, given.tokens)
        else:
            write_corpus(folder, given.kind if given.what == "rows" else "json", given.megabytes)
            train_bpe(folder)
        for _ in range(given.rounds):
            for way in WAYS[given.what]:
                words = [sys.executable, "-m", "benchmarks.data", given.what, "--one", way, name]
                subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
