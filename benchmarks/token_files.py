"""Index token files of others, or tokenise JSON lines; print one JSON line of seconds and memory.

`map` tokenises by Hugging Face `datasets.map`; `alone` calls the tokenizer with texts in memory, so
no way can be faster. Both use one process, and a tokenizer.json that is trained for it.

python -m benchmarks.token_files index --files 5000 --tokens 50000
python -m benchmarks.token_files tokenise --megabytes 200 --tokenizer bpe --workers 1
python -m benchmarks.token_files map --megabytes 200 --tokenizer bpe
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from meshwright.config.training import Source
from meshwright.datasets.token_cache.spec import TokenizationSpec
from meshwright.datasets.token_cache.tokenizing import open_cache

try:
    from meshwright.datasets.files import Entry
except ImportError:  # before it had a file of its own
    from meshwright.datasets.documents import Entry


def write_tokens(folder: Path, files: int, tokens: int) -> Source:
    """Write shards of random bytes as numpy arrays, each document with an EOS."""
    rng = np.random.default_rng(0)
    for number in range(files):
        ids = rng.integers(0, 256, tokens).astype("<u2")
        ids[rng.integers(0, tokens, tokens // 500)] = ids[-1] = 257
        np.save(folder / f"{number:05}.npy", ids)
    return Source(dataset="tokens", dataset_path=str(folder))


def write_lines(folder: Path, megabytes: int) -> Source:
    """Write JSON lines whose texts are files of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_text("utf-8", "replace") for file in files]
    with open(folder / "a.jsonl", "w") as file:
        while file.tell() < megabytes * 1_000_000:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return Source(dataset="json", dataset_path=str(folder / "a.jsonl"))


def train_bpe(folder: Path) -> str:
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
    return str(folder / "tokenizer.json")


def by_map(path: str, tokenizer: str, folder: Path) -> int:
    """Tokenise as the course of Hugging Face does; return the number of tokens."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    encode = Tokenizer.from_file(tokenizer).encode_batch
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(folder))
    mapped = rows.map(
        lambda batch: {"ids": [[*found.ids, 0] for found in encode(batch["text"])]},
        batched=True,
        remove_columns=["text"],
    )
    return sum(len(ids) for batch in mapped.with_format("numpy").iter(1000) for ids in batch["ids"])


def alone(path: str, tokenizer: str) -> int:
    """Encode one text after the other."""
    from meshwright.datasets.tokenizers.kinds import build_tokenizer

    encode = build_tokenizer(tokenizer).encode
    with open(path) as file:
        texts = [json.loads(line)["text"] for line in file]
    start = cpu_seconds()
    count = sum(len(encode(text)) + 1 for text in texts)
    print(json.dumps({"alone": round(cpu_seconds() - start, 2)}))
    return count


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["index", "tokenise", "map", "alone"])
    for flag, default in (("--files", 5000), ("--tokens", 50000), ("--megabytes", 200)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        if args.what == "index":
            source = write_tokens(folder, args.files, args.tokens)
        else:
            source = write_lines(folder, args.megabytes)
        tokenizer = train_bpe(Path(name)) if args.tokenizer == "bpe" else args.tokenizer
        start, used = time.perf_counter(), cpu_seconds()
        if args.what == "map":
            count = by_map(source.dataset_path, tokenizer, Path(name))
        elif args.what == "alone":
            count = alone(source.dataset_path, tokenizer)
        else:
            recipe = TokenizationSpec(Entry("training", "data", source), tokenizer)
            cache = open_cache(recipe, Path(name) / "cache", num_workers=args.workers)
            count = cache.num_tokens
        seconds, used = time.perf_counter() - start, cpu_seconds() - used
        peak = max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        facts = {"seconds": round(seconds, 2), "cpu_seconds": round(used, 2)}
        facts |= {"tokens": count, "peak_mib": peak >> 10}
        print(json.dumps(vars(args) | facts | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
