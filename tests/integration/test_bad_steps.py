"""A job that skips bad steps, on real processes: to the end of its budget, and resumed."""

import json
import shutil
from pathlib import Path

import pytest

from meshwright.checkpoint import commit
from tests.helpers.compare_checkpoints import assert_same_tensors
from tests.helpers.jobs import ROOT, Done, records, train_on_ranks

FACTORS = {"7": float("nan"), "13": 1000.0, "18": float("-inf")}
SKIP = (
    *("--bad_steps.policy", "skip"),
    *("--bad_steps.spike_std", 20, "--bad_steps.spike_window", 5),
    *("--metrics.log_freq", 4, "--checkpoint.interval", 5),
)


def train(folder: Path, *overrides: object, code: int = 0) -> Done:
    options = {"script": ROOT / "tests/helpers/faulty_train.py", "FACTORS": json.dumps(FACTORS)}
    return train_on_ranks(folder, *SKIP, *overrides, code=code, **options)


def skipped_steps(folder: Path) -> list[dict]:
    lines = (folder / "skipped_steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


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
    assert commit.saved_steps(checkpoints) == [10, 15]
    saved = commit.inspect(checkpoints / "step-10")["bad_steps"]
    assert saved["skipped"] == [7]
    assert saved["statistics"]["num_good"] == 9

    # step 13 is a spike only by what was known of steps before the resume
    shutil.copytree(whole, resumed)
    train(resumed, "--checkpoint.load_step", 10, "--bad_steps.budget", 3)
    first, second, third = skipped_steps(resumed)
    assert [first, second] == skipped_steps(whole)
    assert [row["step"] for row in (first, second, third)] == [7, 13, 18]
    assert records(resumed)[-1]["loss/train"] < records(resumed)[0]["loss/train"] - 0.5

    both = [folder / "checkpoint" / "step-15" for folder in (resumed, whole)]
    assert_same_tensors(*both)
    ours, theirs = (commit.inspect(checkpoint)["bad_steps"] for checkpoint in both)
    assert ours == theirs
    assert ours["skipped"] == [7, 13]
