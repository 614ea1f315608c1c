"""Plants five documents that don't belong into a corpus, and asks `meshwright replay` for them.

    python -m tests.campaigns.documents --runs 4 --seed 1

A model that has read Python's library reads it again with random characters, German, base64,
shuffled letters and a phrase that repeats, each in the place of a document that is drawn. `--scan`,
by the weights before, has to have each of them among the first 8 of an end; `--step N`, of the
first step that reads a full sample of one and of no other, has to have it first. Every answer is a
command of its own, of which processor seconds are taken, imports included: 30 at most.
"""

import argparse
import base64
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from meshwright.config.loader import load_config
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import SampleRules
from tests.helpers.forked import Forked
from tests.helpers.jobs import CONFIG, ROOT, ended, environment

DOCUMENTS, CHARACTERS, STEPS = 256, 2000, 92
MOST_CPU_S, FIRST = 30, 8
WORDS = {
    "model.args.dim": 64,
    "model.args.n_layers": 4,
    "model.args.hidden_dim": 128,
    "training.dataset": "json",
    "training.steps": STEPS,
    "training.seq_len": 128,
    "training.global_batch_size": 16,
    "training.local_batch_size": 16,
    "optimizer.lr": 3e-3,
    "lr_scheduler.warmup_steps": 10,
    "lr_scheduler.decay_ratio": 0.0,
    "checkpoint.interval": 20,
    "checkpoint.keep_latest_k": 0,
}
GERMAN = """
der Bäcker verkauft am Morgen frische Brötchen und die Kinder laufen mit ihren Taschen durch
den Regen zur Schule während ein alter Mann auf der Bank neben dem Brunnen sitzt und seine
Zeitung liest aber niemand weiß warum er jeden Tag dorthin kommt vielleicht wartet er nur auf
besseres Wetter oder auf einen Freund aus früheren Jahren der längst weggezogen ist
"""


def planted(draw: random.Random, clean: str) -> dict[str, str]:
    """Return a document of each kind.

    Args:
        clean: whose letters are shuffled.
    """
    return {
        "characters": "".join(map(chr, draw.choices(range(0x4E00, 0x9FA5), k=700))),
        "language": " ".join(draw.choices(GERMAN.split(), k=300)),
        "base64": base64.b64encode(draw.randbytes(1500)).decode(),
        "letters": "".join(draw.sample(clean, len(clean))),
        "phrase": "All work and no play makes Jack a dull boy. " * 45,
    }


def corpora(folder: Path, draw: random.Random) -> dict[str, int]:
    """Write clean.jsonl, and dirty.jsonl with the planted ones; return each kind's number."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = (path.read_text("utf-8", errors="ignore")[:6000] for path in sources)
    pieces = [text[at : at + CHARACTERS] for text in texts for at in range(0, 6000, CHARACTERS)]
    found = [piece for piece in pieces if len(piece) > 1500][:DOCUMENTS]
    assert len(found) == DOCUMENTS
    _write(folder / "clean.jsonl", found)
    kinds = planted(draw, found[0])
    numbers = dict(zip(kinds, draw.sample(range(DOCUMENTS), len(kinds)), strict=True))
    for kind, number in numbers.items():
        found[number] = kinds[kind]
    _write(folder / "dirty.jsonl", found)
    return numbers


def _write(file: Path, texts: Sequence[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(folder: Path) -> None:
    """Train on the clean documents, and with the result on the others."""
    initial = {"checkpoint.initial_load_path": folder / f"clean/checkpoint/step-{STEPS}"}
    for name, more in (("clean", {}), ("dirty", initial)):
        keys = WORDS | more | {"training.dataset_path": folder / f"{name}.jsonl"}
        words = (f"--{key}={value}" for key, value in keys.items())
        files = [f"--job.config_file={CONFIG}", f"--job.dump_folder={folder / name}"]
        job = Forked([ROOT / "train.py", *files, *words], environment(OMP_NUM_THREADS=1))
        ended(job.wait(600), 0)


def samples_of(run: Path) -> Iterator[tuple[int, set[int]]]:
    """Yield the step of every sample, in order, and the numbers of its documents."""
    config = load_config([str(run / "config.toml")])
    (source,) = open_data("training", config)
    assert isinstance(source, CachedSource)
    samples = source.samples(SampleRules(config.training.seq_len + 1, config.training.seed))
    size = config.training.global_batch_size
    for index in range(size * config.training.steps):
        yield (
            index // size + 1,
            {source.cache.document_at(at).number for at, _ in samples.ranges(index)},
        )


def steps_of(run: Path, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the first step that has a sample of nothing but a planted document, and no other
    planted one."""
    planted_in: dict[int, set[int]] = {}
    full: dict[int, set[int]] = {}
    for step, documents in samples_of(run):
        here = documents & set(numbers.values())
        planted_in.setdefault(step, set()).update(here)
        if len(documents) == 1:
            full.setdefault(step, set()).update(here)
    return {
        kind: min(s for s, here in planted_in.items() if here == {number} == full.get(s))
        for kind, number in numbers.items()
    }


def answer(run: Path, *words: object) -> tuple[dict, float]:
    """Return what `meshwright replay` prints, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "replay", str(run), "--json", *map(str, words)],
        env=environment(OMP_NUM_THREADS=1, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=600,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds


def place_in(scan: Mapping[str, list[dict]], name: str) -> str:
    """Return the end of the scan that has a document, and its place from 1 on; or nothing."""
    for end in ("highest", "lowest"):
        names = [document["name"] for document in scan[end]]
        if name in names:
            return f"{end} {names.index(name) + 1}"
    return ""


def attack(folder: Path, seed: int) -> Iterator[tuple[bool, str, float]]:
    """Yield for each kind and each question whether the answer is right, the answer in words, and
    its processor seconds."""
    numbers, run = corpora(folder, random.Random(seed)), folder / "dirty"
    train(folder)
    scan, seconds = answer(run, "--scan", "--step", 1, "--samples", FIRST)
    for kind, number in numbers.items():
        place = place_in(scan, f"json {number}")
        yield bool(place), f"scan {kind}: {place or 'not among them'}", seconds
    for kind, step in steps_of(run, numbers).items():
        result, seconds = answer(run, "--step", step)
        names = [sample["documents"][0]["name"] for sample in result["table"]["samples"]]
        place = next((n for n, name in enumerate(names, 1) if name == f"json {numbers[kind]}"), 0)
        yield place == 1, f"step {step} {kind}: {place or 'not among them'}", seconds


def main() -> None:
    """Judge some runs; exit with 1 if an answer is wrong or takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    right, longest, count = 0, 0.0, 0
    for seed in range(args.seed, args.seed + args.runs):
        with tempfile.TemporaryDirectory() as folder:
            for is_right, text, seconds in attack(Path(folder), seed):
                right, count, longest = right + is_right, count + 1, max(longest, seconds)
                print(f"{'right' if is_right else 'wrong'}  seed {seed}  {text}", flush=True)
    print(f"{right} of {count} right, each in at most {longest:.1f} s of a processor")
    sys.exit(right < count or longest > MOST_CPU_S)


if __name__ == "__main__":
    main()
