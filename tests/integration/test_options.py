"""Whole jobs with one option each: bad steps, to the end of their budget and resumed; averaged
weights, resumed to the bit, validated and exported; experts."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.state import AVERAGE
from tests.helpers.cli import export
from tests.helpers.compare_checkpoints import assert_same_tensors, tensors
from tests.helpers.hf import tensors_of
from tests.helpers.jobs import ROOT, Done, records, train_on_ranks
from tests.helpers.needs import skip_without_mesh_of_experts

FACTORS = {"7": float("nan"), "13": 1000.0, "18": float("-inf")}
SKIP = (
    *("--bad_steps.policy", "skip"),
    *("--bad_steps.spike_std", 20, "--bad_steps.spike_window", 5),
    *("--metrics.log_freq", 4, "--checkpoint.interval", 5),
)


def train(folder: Path, *overrides: object, code: int = 0) -> Done:
    options = {"script": ROOT / "tests/helpers/faulty_train.py", "FACTORS": json.dumps(FACTORS)}
    return train_on_ranks(folder, *SKIP, *overrides, code=code, **options)


@pytest.mark.slow
def test_a_job_skips_up_to_its_budget_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    result = train(whole, "--bad_steps.budget", 2, code=3)
    said = result.stdout
    assert result.stderr == ""
    assert "7 was skipped (1 of at most 2): non-finite loss on rank 1; its samples: 48 " in said
    assert "13 was skipped (2 of at most 2): loss " in said
    assert "stopped: non-finite loss on rank 1 at step 18; the weights are as they were" in said
    counts = {row["step"]: row["optim/skipped_steps"] for row in records(whole)}
    assert counts == {1: 0, 4: 0, 8: 1, 12: 1, 16: 2}
    checkpoints = whole / "checkpoint"
    assert listing.saved_steps(checkpoints) == [10, 15]
    saved = integrity.inspect(checkpoints / "step-10")["bad_steps"]
    assert saved["skipped"] == [7]
    assert saved["statistics"]["num_good"] == 9

    # step 13 is a spike only by what was known of steps before the resume
    shutil.copytree(whole, resumed)
    train(resumed, "--checkpoint.load_step", 10, "--bad_steps.budget", 3)
    first, second, third = records(resumed, "skipped_steps")
    assert [first, second] == records(whole, "skipped_steps")
    assert [row["step"] for row in (first, second, third)] == [7, 13, 18]
    assert records(resumed)[-1]["loss/train"] < records(resumed)[0]["loss/train"] - 0.5

    both = [folder / "checkpoint" / "step-15" for folder in (resumed, whole)]
    assert_same_tensors(*both)
    ours, theirs = (integrity.inspect(checkpoint)["bad_steps"] for checkpoint in both)
    assert ours == theirs
    assert ours["skipped"] == [7, 13]


DECAY = 0.5
COMMON = ("--checkpoint.interval", 2, "--checkpoint.keep_latest_k", 0)
STILL = ("--optimizer.lr", 1e-30, "--optimizer.weight_decay", 0)
"""So that weights stay as they are loaded."""
MEAN = (
    *("--checkpoint.average.decay", DECAY, "--validation.enable", "--validation.freq", 4),
    *("--validation.num_samples", 8, "--validation.dataset_split", "validation"),
)


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoint" / f"step-{number}"


def train_to(folder: Path, steps: int, *words: object) -> None:
    train_on_ranks(folder, *COMMON, "--training.steps", steps, *words)


@pytest.mark.slow
def test_a_mean_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """On other meshes: `meshwright prove`, with a config that has one."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_to(whole, 8, *MEAN)
    train_to(resumed, 4, *MEAN, "--lr_scheduler.total_steps", 8)
    train_to(resumed, 8, *MEAN)
    assert_same_tensors(step(whole, 8), step(resumed, 8))
    found = [records(folder)[-1] for folder in (whole, resumed)]
    for name in ("validation/loss", "average/validation/loss"):
        assert found[0][name] == found[1][name]
    assert found[0]["validation/loss"] != found[0]["average/validation/loss"]

    saved = tensors(step(whole, 8))
    # validated as it is: another job that starts from it, as Hugging Face's folder, has its loss
    export([str(step(whole, 8)), str(tmp_path / "hf"), "--average", "--dtype", "float32"])
    exported = tensors_of(tmp_path / "hf")
    assert torch.equal(exported["model.norm.weight"], saved[f"{AVERAGE}norm.weight"])
    start = ("--checkpoint.initial_load_path", tmp_path / "hf", "--checkpoint.initial_load_in_hf")
    train_to(tmp_path / "again", 1, *MEAN, *start, *STILL)
    again = records(tmp_path / "again")[-1]["validation/loss"]
    assert again == pytest.approx(found[0]["average/validation/loss"], rel=1e-6)


WITH_EXPERTS = "{dim=32, n_layers=2, n_heads=4, head_dim=8, n_experts=8, n_active=2, expert_dim=32}"


def test_the_figures_of_experts_are_reported(tmp_path: Path) -> None:
    skip_without_mesh_of_experts()
    words = ("--model.name=qwen3_moe", f"--model.args={WITH_EXPERTS}", "--training.steps=12")
    words += ("--experts.bias_update_rate=0.001", "--parallelism.expert_parallel_degree=2")
    train_on_ranks(tmp_path, *words)
    last = records(tmp_path)[-1]
    assert 1 <= last["experts/load_max"] <= 8 / 2
    assert 0 <= last["experts/load_min"] <= 1
    assert 0 < last["experts/entropy"] <= 2.08  # log 8
    assert 0 < last["experts/bias_range"] <= 2 * 11 * 0.001 + 1e-6
    assert last["experts/balance_loss"] == pytest.approx(1, rel=0.5)
    loads = json.loads((tmp_path / "experts.json").read_text())
    assert loads["step"] == last["step"]
    assert loads["layers"].keys() == {"0", "1"}
    means = [sum(layer) / 8 for layer in loads["layers"].values()]
    assert len(set(means)) == 1  # as many tokens in every layer
    busiest = max(max(layer) for layer in loads["layers"].values())
    assert busiest / means[0] == pytest.approx(last["experts/load_max"])
