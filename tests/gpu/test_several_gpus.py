"""Meshes of several GPUs against one; what becomes of a rank that is killed.

With fewer GPUs than ranks they share them, see launch.py.
"""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from meshwright.commands.prove.bounds import BOUNDS
from meshwright.system import hardware
from tests.gpu.launch import outputs, run, started
from tests.helpers.jobs import losses, ranks_of, records, wait_for
from tests.helpers.needs import skip_without_mesh_of_experts

FOUR_LAYERS = "--model.args.n_layers=4"  # a schedule of two stages a rank needs so many
BF16 = "--training.mixed_precision_param=bfloat16"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
TP, PP, CP = (
    (f"--parallelism.{axis}_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1")
    for axis in ("tensor", "pipeline", "context")
)
HSDP = ("--parallelism.data_parallel_replicate_degree=2", TP[1])
EXPERTS = ("--model.name=qwen3_moe", "--model.args.head_dim=8")
EP = "--parallelism.expert_parallel_degree=2"
COMPILED = "--compile.enable=true"
DOCUMENTS = "--training.mask_documents=true"
WIDE = "--model.args.dim=64"  # flex attention takes heads of 16 and more
FLOAT8 = (BF16, "--float8.enable=true")
BY_TENSOR = "--float8.recipe_name=tensorwise"
CHANGES = (*FLOAT8, BY_TENSOR, DOCUMENTS, WIDE)
Losses = dict[int, tuple[float, float]]
AXES = {
    "FSDP": (),
    "FSDP, compiled": (COMPILED,),
    "FSDP, float8": FLOAT8,
    "FSDP, float8 by tensor, compiled": (*FLOAT8, BY_TENSOR, COMPILED),
    "TP, float8 by tensor": (*TP, *FLOAT8, BY_TENSOR),
    "FSDP, offload": ("--training.enable_cpu_offload=true",),
    "HSDP": HSDP,
    "TP": TP,
    "TP, compiled": (*TP, COMPILED),
    "PP": PP,
    "PP, Interleaved1F1B": (*PP, f"{SCHEDULE}=Interleaved1F1B"),
    "PP, ZBVZeroBubble": (*PP, f"{SCHEDULE}=ZBVZeroBubble"),
    "CP": CP,
    "CP, bfloat16": (*CP, BF16),
    "CP, documents": (*CP, DOCUMENTS, WIDE),
    "experts": EXPERTS,
    "EP": (*EXPERTS, EP),
    "EP, compiled, bfloat16": (*EXPERTS, EP, COMPILED, BF16),
}
AXES_OF_FOUR = {
    "FSDP x TP": (TP[0], "--parallelism.data_parallel_shard_degree=2"),
    "HSDP x PP": (*HSDP, PP[0]),
    "TP x CP": (TP[0], *CP),
    "FSDP x EP x TP": (*EXPERTS, EP, TP[0], "--parallelism.data_parallel_shard_degree=2"),
}


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> Callable[[tuple[str, ...]], Losses]:
    """The job on one GPU, by its words that change its numbers."""
    return cache(lambda words: run(tmp_path_factory.mktemp("one"), 1, FOUR_LAYERS, *words))


@pytest.mark.parametrize("axis", [*AXES, *AXES_OF_FOUR])
def test_several_gpus_train_as_one(on_one, tmp_path: Path, axis: str) -> None:
    words = AXES.get(axis) or AXES_OF_FOUR.get(axis, ())
    if EP in words:
        skip_without_mesh_of_experts()
    is_float8 = FLOAT8[1] in words
    if is_float8 and not hardware.has_float8(torch.device("cuda")):
        pytest.skip("this GPU does not multiply in float8")
    found = run(tmp_path, 4 if axis in AXES_OF_FOUR else 2, FOUR_LAYERS, *words)
    want = on_one(tuple(word for word in words if word in (*EXPERTS, *CHANGES)))
    assert found.keys() == want.keys()
    # the fused kernel of context parallelism takes 16 bits alone
    tolerance = 2e-2 if BF16 in words else 1e-4
    # AdamW hides the norm's scale later
    of_norm = BOUNDS["float8"].grad_norm if is_float8 else tolerance
    assert found[1][1] == pytest.approx(want[1][1], rel=of_norm)
    for step, (loss, _) in want.items():
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
    first, second, _ = (row["memory/peak_gib"] for row in records(tmp_path))
    assert first < 1.1 * second


def test_a_killed_rank_ends_the_job_which_then_resumes(tmp_path: Path) -> None:
    whole, folder = run(tmp_path / "whole", 2), tmp_path / "killed"
    has_begun = lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) >= 7  # noqa: E731
    with started(folder, 2) as jobs:
        wait_for(has_begun, "step 7", seconds=120)
        os.kill(max(ranks_of(folder)), signal.SIGKILL)
        outputs(jobs)
    codes = {job.returncode for job in jobs}
    assert 128 + signal.SIGKILL in codes
    assert 0 not in codes  # a machine that lost the rank
    resumed = run(folder, 2)
    for step, (loss, _) in whole.items():
        assert resumed[step][0] == pytest.approx(loss, rel=1e-4), f"step {step}"
