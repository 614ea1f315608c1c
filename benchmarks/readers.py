"""Measure how fast local files become documents: our readers, and Hugging Face `datasets`.

    python -m benchmarks.readers --megabytes 200 --kinds json parquet text

Each case runs in a process of its own, in turns. Seconds are of the processor, since other programs
may run. Memory is the peak above that of the started process.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

MB = 1_000_000
KINDS = ("json", "parquet", "text")


def make(kind: str, path: Path, megabytes: int) -> None:
    """Write documents of 3 kB on average; Parquet in a single row group, as pyarrow does."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 9))) for _ in range(5000)]
    texts = []
    while sum(map(len, texts[-1:])) + 3000 * len(texts) < megabytes * MB:
        texts.append(" ".join(chance.choices(words, k=chance.randint(1, 1000))))
    if kind == "json":
        with open(path, "w") as file:
            file.writelines(
                json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts)
            )
    elif kind == "text":
        path.write_text("\n".join(texts))
    else:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": texts, "id": [str(n) for n in range(len(texts))]})
        parquet.write_table(table, path)


def ours(kind: str, path: Path) -> Iterator[str]:
    """Yield documents by our readers."""
    from meshwright.config.training import Source
    from meshwright.datasets.files import Entry, described
    from meshwright.datasets.rows import LocalDocuments

    separator = "\n" if kind == "text" else ""
    source = Source(dataset=kind, dataset_path=str(path), dataset_separator=separator)
    entry = Entry("training", kind, source)
    documents = LocalDocuments(entry, [described(str(path))])
    for part in range(documents.parts):
        for item in documents.read_part(part):
            assert isinstance(item, str)
            yield item


def theirs(kind: str, path: Path) -> Iterator[str]:
    """Yield documents by `datasets`, which converts them to a file of Arrow first."""
    import datasets

    datasets.disable_progress_bars()
    with TemporaryDirectory(dir=path.parent) as folder:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=folder)
        for index in range(len(rows)):
            yield rows[index]["text"]


def theirs_mapped(kind: str, path: Path) -> Iterator[str]:
    """As `datasets.map` passes them to a function, in batches."""
    import datasets

    datasets.disable_progress_bars()
    with TemporaryDirectory(dir=path.parent) as folder:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=folder)
        names, lengths = rows.column_names, lambda batch: {"n": [len(t) for t in batch["text"]]}
        for row in rows.map(lengths, batched=True, remove_columns=names):
            yield "x" * row["n"]


CASES = {"ours": ours, "datasets": theirs, "datasets.map": theirs_mapped}


def peak_mib() -> float:
    """Return the peak of this process' memory: ru_maxrss begins with the peak of its parent."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def run_one(case: str, kind: str, path: Path) -> None:
    """Print the figures of one case."""
    import pyarrow  # noqa: F401  both read with it

    before = peak_mib()
    begin, first, count, size = time.process_time(), 0.0, 0, 0
    for text in CASES[case](kind, path):
        first = first or time.process_time() - begin
        count, size = count + 1, size + len(text)
    seconds = time.process_time() - begin
    peak = peak_mib() - before
    speed = path.stat().st_size / MB / seconds
    figures = f"{speed:7.0f} MB/s {first:8.2f} s to the first {peak:8.0f} MiB"
    print(f"{kind:8} {case:14} {figures} {count:9,} documents {size:13,} characters", flush=True)


def main() -> None:
    """Run all cases in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        case, kind, path = given.one
        run_one(case, kind, Path(path))
        return
    with TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / f"{kind}.data" for kind in given.kinds}
        for kind, path in paths.items():
            make(kind, path, given.megabytes)
        for _ in range(given.rounds):
            for kind, path in paths.items():
                for case in CASES:
                    words = [
                        sys.executable,
                        "-m",
                        "benchmarks.readers",
                        "--one",
                        case,
                        kind,
                        str(path),
                    ]
                    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
