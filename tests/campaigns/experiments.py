"""Kills workers of experiments at random moments, and compares the results with undisturbed ones.

    python -m tests.campaigns.experiments --kills 20 --workers 4 --seed 1

One to `--workers` workers share an experiment of 12 runs, each on a simulated node of its own
without locks. Runs are `tests/helpers/fake_train.py`'s, unless `--real`.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.fake_train import BASE, STEP_S

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
base = "tiny.toml"
budget = {steps = 24}
ranks = 1
seeds = 3
margin = 1e-12
[arms.lower]
"optimizer.lr" = "x0.9999"
[arms.higher]
"optimizer.lr" = "x1.0001"
[arms.highest]
"optimizer.lr" = "x1.0002"
"""
"""Pairs of real runs tell even such rates apart. But no arm is decided before it has three pairs,
and the third one not before it has four, so every run is needed."""

Results = dict[tuple[str, int], tuple[float, object]]


def write(folder: Path) -> Path:
    """Write an experiment of 12 runs."""
    folder.mkdir()
    (folder / "tiny.toml").write_text(BASE)
    (folder / "text.txt").write_text("to be, or not to be, that is the question " * 60)
    (folder / "lab.toml").write_text(EXPERIMENT)
    return folder / "lab.toml"


def start(file: Path, number: int, *, is_real: bool, step_s: float = 0.03) -> subprocess.Popen:
    environment = os.environ | {STEP_S: str(step_s), "OMP_NUM_THREADS": "1"}
    program = "meshwright" if is_real else "tests.helpers.experiment_worker"
    if not is_real:
        environment["FAKE_NODE"] = f"node{number}"
    words = [sys.executable, "-m", program, "experiment", "run", str(file)]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)


def results_of(file: Path) -> Results:
    rows = (file.parent / "outputs/lab/results.jsonl").read_text().splitlines()
    return {(r["arm"], r["seed"]): (r["value"], r["curve"]) for r in map(json.loads, rows)}


def ends_of(file: Path) -> list[int]:
    """How often each run ended as it should."""
    histories = sorted((file.parent / "outputs/lab").glob("*/seed-*/history.jsonl"))
    return [history.read_text().count('"finished"') for history in histories]


def disturbed(file: Path, kills: int, most: int, draw: random.Random, is_real: bool) -> int:
    """Kill workers and start others; return how many kills there was time for."""
    workers, started, killed = list[subprocess.Popen](), 0, 0
    wait_s = (2.0, 30.0) if is_real else (0.2, 2.5)
    while True:
        workers = [one for one in workers if one.poll() is None]
        for _ in range(draw.randint(1, most) - len(workers)):
            started += 1
            workers.append(start(file, started, is_real=is_real))
        time.sleep(draw.uniform(*wait_s))
        running = [one for one in workers if one.poll() is None]
        if killed == kills or len(running) < len(workers):
            break
        victim = draw.choice(running)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        killed += 1
    codes = [one.wait(600) for one in workers]
    assert {*codes} <= {3}, codes  # open, with all seeds used
    return killed


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="runs are real, of 24 steps")
    given = parser.parse_args(words)
    draw, since = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        calm = write(Path(temporary) / "calm")
        both = [start(calm, number, is_real=given.real, step_s=0) for number in (0, 1)]
        assert [one.wait(3600) for one in both] == [3, 3]
        expected, left, rounds = results_of(calm), given.kills, 0
        assert len(expected) == 12, expected.keys()
        while left > 0:
            rounds += 1
            file = write(Path(temporary) / f"round-{rounds}")
            killed = disturbed(file, left, given.workers, draw, given.real)
            left -= killed
            print(f"round {rounds}: {killed} kills", flush=True)
            assert results_of(file) == expected, (rounds, file)
            assert ends_of(file) == [1] * 12, (rounds, ends_of(file))
    seconds = time.monotonic() - since
    print(
        f"{given.kills} kills in {rounds} experiments of 12 runs: equal bits, no run twice", end=""
    )
    print(f", in {seconds:.0f} s")


if __name__ == "__main__":
    main()
