"""Every benchmark starts and prints its figure; `benchmarks.planning` is tested with plans."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, environment

pytestmark = pytest.mark.slow
SMALL = {"dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 64, "vocab": 2048}
FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in SMALL.items()]
OURS = ("--modes=eager", "--rounds=1", "--steps=5", "--seq-len=64", *FLAGS)
CASES = {  # words, and what the output has
    "throughput": (  # losses of the same steps, too
        [*OURS, "--dtype=float32", "--contenders", "ours", "bare"],
        r"\| ours \| \d.*\n\| bare \| \d.*(e-0[6-9]| 0\.0e\+00) \| \d \| 1 \|",
    ),
    "roofline": ([json.dumps(SMALL)], r'"products_flops_per_s": .*"copy_bytes_per_s": \d'),
    "attention": (["--sizes=1x64", "--repeats=2", "--dtype=float32"], r"own +forward|no kernel: "),
    "linear_attention": (["--sizes=1x70", "--repeats=2"], r"recurrence +forward .*, errors \d"),
    "overhead": (["--steps=8", "--batch=1"], r"median ratio:\n\d+\.\d+\n$"),
    "checkpoint": (["--saves=2", "--dim=64", "--layers=1"], r"disabled .*\n.*thread .*ratio to"),
    "data": (["--megabytes=1", "--rounds=1"], r"ours +(.*) in (.*\n)*.*map +\1 in "),
    "experts": (["--tokens=64", "--dim=64", "--pairs=2"], r"E 64, K 8: .*\n.*\n\d+\.\d+\n$"),
    "experiments": (["--arms=2"], r"^16 runs: \d\.\d+ s .*\n.*\nshow: \d\.\d+ s\n$"),
    "first_loss": (
        ["--widths=64", "--layers=1", "--vocab-size=64"],
        r"\| mixtral \| 64 \| 1 \| \d",
    ),
    "records": (["--steps=4"], r"log_freq = 10: \d.*\na line of every_step: \d.* ms\n"),
    "replay": (["--steps=2", "--repeats=1"], r"apart\n2 steps: \d.* s of a processor, \d.* s\n"),
    "sentry": (["--pairs=2", "--model.args.n_layers=1"], r"at interval = 100: \d\.\d\d %\n$"),
    "gpu_prediction": (["34M shape like autoresearch's"], r"H200(.*\n)*\| 34M .* \| 524,288 \| \d"),
    "gpu_speed": (["{folder}", "--tiny", "--jobs"], r"\d  memory, GB/s\n"),
}


def run(name: str, *words: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, ROOT / f"benchmarks/{name}.py", *words],
        env=environment(PYTHONPATH=ROOT, TMPDIR=folder, OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 or "no kernel: " in result.stderr, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_prints_its_figure(name: str, tmp_path: Path) -> None:
    words, figure = CASES[name]
    output = run(
        name, *(word.replace("{folder}", str(tmp_path)) for word in words), folder=tmp_path
    )
    assert re.search(figure, output), output


def test_a_step_beside_transformers_has_its_loss(tmp_path: Path) -> None:
    words = ("--step", "--tokens=256", "--dim=128", "--pairs=1")
    output = run("experts", *words, folder=tmp_path)
    losses = [*map(float, re.findall(r"(?:ours|eager|grouped_mm) (\d\.\d+)", output))]
    assert losses == pytest.approx([losses[0]] * 3 + [losses[3]] * 3, rel=1e-5)


def test_every_benchmark_has_a_case() -> None:
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert there == {*CASES, "planning"}
