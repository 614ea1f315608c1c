"""Meshes of two GPUs against one; what becomes of a rank that is killed."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.gpu.launch import figures, run, start
from tests.helpers.jobs import ranks_of

AXES = {
    "FSDP": {"data_parallel_shard_degree": 2},
    "HSDP": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    "TP": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "PP": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "FSDP, compiled": {"data_parallel_shard_degree": 2},
    "PP, Interleaved1F1B": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "PP, ZBVZeroBubble": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "CP": {"context_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "CP, bfloat16": {"context_parallel_degree": 2, "data_parallel_shard_degree": 1},
}
OPTIONS = {
    "CP": "training.mixed_precision_param",
    "FSDP": "compile.enable",
    "PP": "parallelism.pipeline_parallel_schedule",
}
"""Key of the second word of an axis."""
FOUR_LAYERS = "--model.args.n_layers=4"  # a schedule of two stages a rank needs so many


def _words(axis: str) -> list[str]:
    words = [FOUR_LAYERS]
    words += [f"--parallelism.{key}={degree}" for key, degree in AXES[axis].items()]
    kind, _, option = axis.partition(", ")
    if option:
        words.append(f"--{OPTIONS[kind]}={option.replace('compiled', 'true')}")
    return words


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[str, dict[int, tuple[float, float]]]:
    """The job on one GPU, by precision."""
    key = f"--{OPTIONS['CP']}"
    return {
        precision: run(tmp_path_factory.mktemp("one"), 1, FOUR_LAYERS, f"{key}={precision}")
        for precision in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("axis", AXES)
def test_two_gpus_train_as_one(on_one, tmp_path: Path, axis: str) -> None:
    # the fused kernel of context parallelism takes 16 bits alone
    precision, tolerance = ("bfloat16", 2e-2) if "bfloat16" in axis else ("float32", 1e-4)
    found = run(tmp_path, 2, *_words(axis))
    assert found.keys() == on_one[precision].keys()
    for step, (loss, _) in on_one[precision].items():
        assert found[step][0] == pytest.approx(loss, rel=tolerance), f"step {step}"


def test_a_job_that_saves_in_the_background_resumes(tmp_path: Path) -> None:
    """From a copy in host memory of both GPUs' shards, made while the next step computes."""
    words = ["--checkpoint.async_mode=thread", "--checkpoint.interval=5"]
    whole = run(tmp_path, 2, *words)
    resumed = run(tmp_path, 2, *words, "--checkpoint.load_step=15")
    assert resumed.keys() == whole.keys()
    for step, (loss, _) in whole.items():
        assert resumed[step][0] == pytest.approx(loss, rel=1e-4), f"step {step}"


@pytest.mark.only_cuda
def test_the_first_step_needs_no_more_memory_than_the_next(tmp_path: Path) -> None:
    """A sharded optimizer that made its state twice would need 6 times the weights, then 4."""
    sizes = "dim = 2048, n_layers = 8, n_heads = 16, n_kv_heads = 16, hidden_dim = 8192"  # 2 GiB
    words = [f"--model.args={{{sizes}}}", "--training.steps=3", "--checkpoint.enable=false"]
    run(tmp_path, 2, *words)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second, _ = (row["memory/peak_gib"] for row in rows)
    assert first < 1.1 * second


def test_a_killed_rank_ends_the_job_which_then_resumes(tmp_path: Path) -> None:
    whole, folder = run(tmp_path / "whole", 2), tmp_path / "killed"
    job = start(folder, 2)
    end = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(figures(folder)) < 7:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(max(ranks_of(folder)), signal.SIGKILL)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGKILL, output
    resumed = run(folder, 2)
    for step, (loss, _) in whole.items():
        assert resumed[step][0] == pytest.approx(loss, rel=1e-4), f"step {step}"
