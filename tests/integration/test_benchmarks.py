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
    "throughput": ([*OURS, "--contenders", "ours", "bare"], r"\| ours \| \d.*\n\| bare \| \d"),
    "roofline": ([json.dumps(SMALL)], r'"products_flops_per_s": .*"copy_bytes_per_s": \d'),
    "attention": (["--sizes=1x64", "--repeats=2", "--dtype=float32"], r"own +forward|no kernel: "),
    "overhead": (["--steps=8", "--batch=1"], r"median ratio:\n\d\.\d+\n$"),
    "checkpoint": (["--saves=2", "--dim=64", "--layers=1"], r"disabled .*\n.*thread .*ratio to"),
    "data": (["tokens", "--megabytes=1", "--rounds=1"], r"ours +(.*) in (.*\n)*.*map +\1 in "),
    "muon": (
        ["cost", "--dim=64", "--layers=1", "--rounds=1", "--steps=1"],
        r"\| AdamW \| .* \| 0 \|\n\| Muon, owners \| .* \| [\d,]+ \|\n\| Muon, gather \| ",
    ),
    "merge": (["memory", "--megabytes=64"], r"\b[2-4]\.\d\d tensors of 64 MiB\n"),
    "experts": (["--tokens=64", "--dim=64", "--pairs=2"], r"E 64, K 8: .*\n.*\n\d\.\d+\n$"),
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


def test_a_grid_of_rates_keeps_finished_runs(tmp_path: Path) -> None:
    words = ["grid", str(tmp_path / "runs"), "--muon=2e-3", "--batch=1", "--steps=1", "--seeds=0"]
    for rates, count in (("1e-3", 2), ("1e-3,2e-3", 3)):
        output = run("muon", *words, f"--adamw={rates}", folder=tmp_path)
        assert len((tmp_path / "runs").read_text().splitlines()) == count
    losses = re.findall(r"\| \w+ \| \de-3 \| (\d\.\d+) \| \1 \|\n", output)
    assert len(losses) == 3


def test_a_step_beside_transformers_has_its_loss(tmp_path: Path) -> None:
    words = ("--step", "--tokens=256", "--dim=128", "--pairs=1")
    output = run("experts", *words, folder=tmp_path)
    losses = [*map(float, re.findall(r"(?:ours|eager|grouped_mm) (\d\.\d+)", output))]
    assert losses == pytest.approx([losses[0]] * 3 + [losses[3]] * 3, rel=1e-5)


def test_the_wait_for_data_of_a_finished_job_is_added_up(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"time/data_s": 0.01, "time/step_s": 0.5}\n' * 4)
    assert "data: 2.0000 % of 4 logged steps" in run("data", "share", str(metrics), folder=tmp_path)


@pytest.mark.parametrize("what", ["rows", "samples", "index"])
def test_data_is_measured_in_every_way(what: str, tmp_path: Path) -> None:
    words = ("--kind=text", "--megabytes=1", "--files=4", "--tokens=100", "--rounds=1")
    assert re.search(r"ours +\d.* in ", run("data", what, *words, folder=tmp_path))


def test_every_benchmark_has_a_case() -> None:
    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    of_plans = {"planning"}
    assert there - of_plans == {*CASES}
