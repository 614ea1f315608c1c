"""Meshes of two GPUs against one; what becomes of a rank that is killed."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.gpu.launch import GPUS, run
from tests.helpers.jobs import command, environment, losses, ranks_of, wait_for

FOUR_LAYERS = "--model.args.n_layers=4"  # a schedule of two stages a rank needs so many
BF16 = "--training.mixed_precision_param=bfloat16"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
TP, PP, CP = (
    (f"--parallelism.{axis}_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1")
    for axis in ("tensor", "pipeline", "context")
)
HSDP = ("--parallelism.data_parallel_replicate_degree=2", TP[1])
AXES = {
    "FSDP": (),
    "FSDP, compiled": ("--compile.enable=true",),
    "HSDP": HSDP,
    "TP": TP,
    "PP": PP,
    "PP, Interleaved1F1B": (*PP, f"{SCHEDULE}=Interleaved1F1B"),
    "PP, ZBVZeroBubble": (*PP, f"{SCHEDULE}=ZBVZeroBubble"),
    "CP": CP,
    "CP, bfloat16": (*CP, BF16),
}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[tuple[str, ...], dict[int, tuple[float, float]]]:
    """The job on one GPU, in fp32 and in bf16."""
    return {
        words: run(tmp_path_factory.mktemp("one"), 1, FOUR_LAYERS, *words)
        for words in ((), (BF16,))
    }


@pytest.mark.parametrize("axis", AXES)
def test_two_gpus_train_as_one(on_one, tmp_path: Path, axis: str) -> None:
    # the fused kernel of context parallelism takes 16 bits alone
    precision, tolerance = ((BF16,), 2e-2) if BF16 in AXES[axis] else ((), 1e-4)
    found = run(tmp_path, 2, FOUR_LAYERS, *AXES[axis])
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
    job = subprocess.Popen(command(folder), env=environment(NGPU=2, **GPUS))
    has_begun = lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 7  # noqa: E731
    wait_for(has_begun, "step 7", seconds=120)
    os.kill(max(ranks_of(folder)), signal.SIGKILL)
    assert job.wait(timeout=120) == 128 + signal.SIGKILL
    resumed = run(folder, 2)
    for step, (loss, _) in whole.items():
        assert resumed[step][0] == pytest.approx(loss, rel=1e-4), f"step {step}"
