"""Random jobs that are killed on one mesh and go on on another.

    python -m tests.campaigns.moved_jobs --jobs 40 --seed 1
    python -m tests.campaigns.moved_jobs --jobs 40 --seed 1 --only 17      (that one again)

Draws a family, an optimizer, an order of the data, what is saved, and two meshes of up to four
ranks. A rank or all ranks of the first are killed once a random step is on record. The second
resumes and ends the job. Every loss and gradient norm on record, and every tensor of the last
checkpoint, must be those of one process that nobody killed. How much rounding may change them is
measured: ten times as much as they differ in the undisturbed jobs of the two meshes.
"""

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.config.loader import load_config
from meshwright.parallelisms.rules.degrees import KEYS
from meshwright.system.errors import ConfigError
from tests.helpers.compare_checkpoints import tensors
from tests.helpers.jobs import CONFIG, Done, ended, losses, start_on_ranks, wait_for
from tests.helpers.resolved import resolved

STEPS = 16
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
ROUNDING, LEAST = 10, 1e-6
"""A figure may differ by ROUNDING times what the twins differ by, and by LEAST at any rate: some
roundings of fp32, of which 2^-24 is one."""
PATIENCE_S = 600
TWINS = ("first", "second")
Words = list[str]


@dataclass(frozen=True)
class Drawn:
    """A job, its two meshes as words, and its death."""

    job: Words
    meshes: tuple[Words, Words]
    ranks: tuple[int, int]
    killed_after: int
    kills_all: bool


def draw(seed: int, number: int) -> Drawn:
    """Return the job of that number: a function of the arguments."""
    chance = random.Random(f"{seed} {number}")
    while True:
        job = _words(chance)
        ranks = chance.choice([1, 2, 4, 4]), chance.choice([1, 2, 4, 4])
        first, second = (_mesh(chance, n) for n in ranks)
        try:
            for mesh, n in ((first, ranks[0]), (second, ranks[1])):
                config = load_config(["--job.config_file", str(CONFIG), *job, *mesh])
                resolved(config, n, device_type="cpu")
        except ConfigError:
            continue
        if first != second:
            death, kills_all = chance.randrange(5, STEPS - 2), chance.random() < 0.5
            return Drawn(job, (first, second), ranks, death, kills_all)


def _words(chance: random.Random) -> Words:
    def maybe(odds: float, *words: str) -> Words:
        return [*words] if chance.random() < odds else []

    interval = chance.randint(2, 5)
    words = [f"--training.steps={STEPS}", f"--checkpoint.interval={interval}"]
    words.append(f"--model.name={chance.choice(['llama', 'qwen3', 'olmo2'])}")
    words.append(f"--optimizer.name={chance.choice(['AdamW', 'muon'])}")
    words.append("--optimizer.muon.dtype=float32")  # in bf16, equal steps would be rounded apart
    words.append(f"--checkpoint.async_mode={chance.choice(['disabled', 'thread'])}")
    words += maybe(0.3, "--checkpoint.average.decay=0.9")
    words += maybe(0.3, "--training.mask_documents=true")
    words += maybe(0.3, "--training.dataset_mode=streamed", "--training.stream_shards=8") or maybe(
        0.4, "--training.packing=best_fit"
    )
    words += maybe(0.3, "--model.args.tie_embeddings=true")
    words += maybe(0.3, "--model.frozen=['layers.0.*']")
    words += maybe(0.3, "--training.enable_cpu_offload=true")
    words.append(f"--activation_checkpoint.mode={chance.choice(['none', 'full'])}")
    return words


def _mesh(chance: random.Random, ranks: int) -> Words:
    degrees = dict.fromkeys(AXES, 1)
    while ranks > 1:
        degrees[chance.choice(AXES)] *= 2
        ranks //= 2
    return [f"--parallelism.{KEYS[axis]}={degree}" for axis, degree in degrees.items()]


def _train(folder: Path, *words: str, ranks: int) -> Done:
    return ended(start_on_ranks(folder, *words, ranks=ranks).wait(PATIENCE_S), 0)


def run(drawn: Drawn, folder: Path) -> tuple[str, list[str]]:
    """Train, kill and move the job; return what was done, and what is wrong."""
    keep = ["--checkpoint.keep_latest_k=0"]
    alone = ["--parallelism.data_parallel_shard_degree=1"]
    first, second = drawn.meshes
    _train(folder / "alone", *drawn.job, *keep, *alone, ranks=1)
    for name, mesh, ranks in zip(TWINS, drawn.meshes, drawn.ranks, strict=True):
        _train(folder / name, *drawn.job, *keep, *mesh, ranks=ranks)
    moved = folder / "moved"
    _train_until_killed(drawn, moved, [*drawn.job, *keep, *first])
    saved = [int(path.name[5:]) for path in (moved / "checkpoint").glob("step-*[0-9]")]
    done = _train(moved, *drawn.job, *keep, *second, ranks=drawn.ranks[1])
    resumed = re.search(r"resumed from \S+/step-(\d+) ", done.stdout + done.stderr)
    said = f"killed after step {drawn.killed_after}, resumed from {resumed and resumed[1]}"
    if not resumed or int(resumed[1]) != max(saved, default=0):
        return said, [f"resumed from {resumed and resumed[1]}, of {sorted(saved)}"]
    return said, [*_differences(folder)]


def _train_until_killed(drawn: Drawn, folder: Path, words: Words) -> None:
    job = start_on_ranks(folder, *words, ranks=drawn.ranks[0])
    metrics = folder / "metrics.jsonl"

    def is_there() -> bool:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return bool(lines) and json.loads(lines[-1])["step"] >= drawn.killed_after

    wait_for(is_there, f"step {drawn.killed_after}", PATIENCE_S)
    victims = job.ranks if drawn.kills_all else job.ranks[-1:]
    for rank in victims:
        rank.send_signal(signal.SIGKILL)
    job.wait(PATIENCE_S)  # 0 if it was over before


def _differences(folder: Path) -> Iterator[str]:
    """Yield what differs from the job alone by more than rounding."""
    want, got, *twins = (_figures(folder / name) for name in ("alone", "moved", *TWINS))
    if got.keys() != want.keys():
        yield f"only one has {sorted(got.keys() ^ want.keys())}"
        return
    for name, figure in want.items():
        rounding = max(_relative(twin[name], figure) for twin in twins)
        difference = _relative(got[name], figure)
        if difference > max(LEAST, ROUNDING * rounding):
            yield f"{name} differs by {difference:.1e}, in the twins by {rounding:.1e}"


def _figures(run: Path) -> dict[str, Tensor]:
    """Return losses and gradient norms by step, and the tensors of the last checkpoint."""
    by_step = sorted(losses(run).items())
    steps = f"steps {[step for step, _ in by_step]}"
    found = {
        f"{what} of {steps}": torch.tensor([figures[place] for _, figures in by_step])
        for place, what in enumerate(("loss", "gradient norm"))
    }
    saved = tensors(run / f"checkpoint/step-{STEPS}")
    return found | {name: tensor for name, tensor in saved.items() if not name.startswith("rng.")}


def _relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, in units of the largest value."""
    return float((a.double() - b).abs().max()) / (float(b.abs().max()) or 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the job to run, from 0")
    options = parser.parse_args()
    wrong, begun = list[int](), time.monotonic()
    numbers = range(options.jobs) if options.only is None else [options.only]
    for number in numbers:
        drawn = draw(options.seed, number)
        with tempfile.TemporaryDirectory(prefix="moved_") as folder:
            said, failures = run(drawn, Path(folder))
        wrong += [number] if failures else []
        degrees = [" ".join(w[14:] for w in mesh if w[-1] != "1") or "one" for mesh in drawn.meshes]
        print(f"{number:3} {'WRONG' if failures else 'equal'} {' -> '.join(degrees)}: {said}")
        print(*(f"    {failure}" for failure in failures), sep="\n", end="\n" if failures else "")
        sys.stdout.flush()
    seconds = time.monotonic() - begun
    print(f"{len(numbers)} jobs, seed {options.seed}: {len(wrong)} wrong {wrong or ''}", end=" ")
    print(f"in {seconds:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
