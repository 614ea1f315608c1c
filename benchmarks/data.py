"""Tokens: how fast documents become them, beside `datasets.map`, Megatron-LM and no framework.

    python -m benchmarks.data --megabytes 32

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
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.config.training import Source
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import build_tokenizer

CORPUS = "corpus.json"
"""The file with the documents in the folder that each way is given. A way yields 0 when it is ready
to begin, and then the tokens that are done."""


def write_corpus(path: Path, megabytes: int) -> None:
    """Write JSON lines, no two of them equal."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = 0
    with path.open("w") as corpus:
        for number, file in enumerate(itertools.cycle(files)):
            text = f"# {number}\n{file.read_text('utf-8', 'replace')}"
            corpus.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > megabytes * 1e6:
                return


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


def tokens(folder: Path) -> Iterator[int]:
    """Tokens in a cache."""
    source = Source(dataset="json", dataset_path=str(folder / CORPUS))
    recipe = TokenizationSpec(
        SourceEntry("training", "json", source), str(folder / "tokenizer.json")
    )
    yield 0
    yield open_cache(recipe, folder / f"cache-{os.getpid()}", num_workers=1).num_tokens


def tokens_of_map(folder: Path) -> Iterator[int]:
    """Tokens as the course of Hugging Face makes them; documents become a file of Arrow first."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch
    path, cache = str(folder / CORPUS), str(folder / f"hf-{os.getpid()}")
    yield 0
    loaded = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    mapped = loaded.map(
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
    for line in (folder / CORPUS).open():
        ids = [*made.text_to_ids(json.loads(line)["text"]), 0]
        builder.add_document(ids, [len(ids)])
        yield len(ids)
    builder.finalize(str(to.with_suffix(".idx")))


def tokens_alone(folder: Path) -> Iterator[int]:
    """Tokens of texts in memory, one after the other: no way can be faster with this tokenizer."""
    encode = build_tokenizer(str(folder / "tokenizer.json")).encode
    texts = [json.loads(line)["text"] for line in (folder / CORPUS).open()]
    yield 0
    yield sum(len(encode(text)) + 1 for text in texts)


WAYS = {
    "ours": tokens,
    "datasets.map": tokens_of_map,
    "tokenizer alone": tokens_alone,
    "Megatron-LM": tokens_of_megatron,
}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def peak_mib() -> float:
    """Return the peak of this process' memory: ru_maxrss begins with the peak of its parent."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def run_one(way: str, folder: Path) -> None:
    """Print the figures of one way."""
    work = WAYS[way](folder)
    try:
        next(work)
    except ImportError as error:
        print(f"{way:16} left out: no {error.name}", flush=True)
        return
    peak, used, start = peak_mib(), cpu_seconds(), time.perf_counter()
    count = sum(work)
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    figures = f"in {seconds:7.2f} s, {used:7.2f} s of the processor"
    per_s = f"{count / used:13,.0f}/s {peak_mib() - peak:5.0f} MiB"
    print(f"{way:16} {count:11,} {figures} {per_s}", flush=True)


def main() -> None:
    """Measure all ways in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given.one[0], Path(given.one[1]))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / CORPUS, given.megabytes)
        train_bpe(folder)
        for _ in range(given.rounds):
            for way in WAYS:
                words = [sys.executable, "-m", "benchmarks.data", "--one", way, name]
                subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
