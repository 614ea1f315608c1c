"""Index token files of others, or tokenise JSON lines; print one JSON line of seconds and memory.

python -m benchmarks.token_files index --files 5000 --tokens 50000
python -m benchmarks.token_files tokenise --megabytes 200 --tokenizer assets/tokenizers/debug
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


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["index", "tokenise"])
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
        recipe = TokenizationSpec(Entry("training", "data", source), args.tokenizer)
        start = time.perf_counter()
        cache = open_cache(recipe, Path(name) / "cache", num_workers=args.workers)
        seconds = time.perf_counter() - start
        peak = max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        facts = {"seconds": round(seconds, 2), "tokens": cache.num_tokens, "peak_mib": peak >> 10}
        print(json.dumps(vars(args) | facts | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
