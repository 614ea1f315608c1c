"""A job of three stages equals three jobs joined by hand, to the bit, also through kills."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest

from meshwright.checkpoint import commit
from tests.helpers.compare_checkpoints import assert_same_tensors
from tests.helpers.jobs import (
    CONFIG,
    ROOT,
    assert_close,
    losses,
    records,
    start_on_ranks,
    train_on_ranks,
    wait_for,
)

SEED = 4

JOB = """
extends = "{config}"

[training]
seq_len = 16
steps = {steps}
token_cache_folder = "{folder}/caches"
{training}

[optimizer]
lr = {lr}

[lr_scheduler]
total_steps = 24
{schedule}

[checkpoint]
keep_latest_k = 0
{checkpoint}

{tables}
"""

SOURCE = """
[[training.{where}datasets]]
name = "{name}"
dataset = "json"
dataset_path = "{name}.jsonl"
weight = {weight}
"""


def source(name: str, weight: float, where: str = "") -> str:
    return SOURCE.format(name=name, weight=weight, where=where)


STAGES = (
    """
[[training.stages]]
until_tokens = 1000              # 128 per step: ends with step 8, at 1024

[[training.stages]]
until_tokens = 3072              # 256 per step: ends with step 16
weights = { a = 1, b = 3 }
global_batch_size = 16
lr = 1e-3

[[training.stages]]
seq_len = 32
global_batch_size = 4
decay_type = "cosine"
"""
    + source("a", 1, "stages.")
    + source("c", 1, "stages.")
)

BY_HAND = (
    {"steps": 8, "lr": 4e-3, "tables": source("a", 3) + source("b", 1)},
    {
        "steps": 16,
        "lr": 1e-3,
        "training": "global_batch_size = 16",
        "tables": source("a", 1) + source("b", 3),
    },
    {
        "steps": 24,
        "lr": 4e-3,
        "training": "global_batch_size = 4",
        "schedule": 'decay_type = "cosine"',
        "checkpoint": 'exclude_from_loading = ["dataloader"]',
        "tables": source("a", 1) + source("c", 1),
    },
)


def write(folder: Path, name: str, **parts: object) -> Path:
    keys = ("training", "schedule", "checkpoint")
    text = JOB.format(config=CONFIG, folder=folder, **{**dict.fromkeys(keys, ""), **parts})
    if name == "3":
        text = text.replace("seq_len = 16", "seq_len = 32")
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts of three sources, the staged job, and the three that are joined by hand."""
    folder, rng = tmp_path_factory.mktemp("stages"), random.Random(SEED)
    for name in "abc":
        texts = [" ".join(rng.choices((name * 3, "sun", "hill"), k=n)) for n in range(1, 120)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    tables = source("a", 3) + source("b", 1) + STAGES
    write(folder, "staged", steps=24, lr=4e-3, tables=tables)
    for number, parts in enumerate(BY_HAND, 1):
        write(folder, str(number), **parts)
    return folder


def train(config: Path, out: Path, ranks: int) -> None:
    done = train_on_ranks(out, ranks=ranks, config=config)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_are_jobs_joined_by_hand(ranks: int, folder: Path) -> None:
    by_hand, staged, killed = (folder / f"{name}{ranks}" for name in ("hand", "staged", "killed"))
    for number in (1, 2, 3):
        train(folder / f"{number}.toml", by_hand, ranks)
    train(folder / "staged.toml", staged, ranks)
    want = losses(by_hand)
    assert losses(staged) == want
    assert [*want] == [*range(1, 25)]
    tokens = {row["step"]: row["data/tokens"] for row in records(staged)}
    assert (tokens[8], tokens[16], tokens[24]) == (1024, 3072, 4096)
    assert_same_tensors(staged / "checkpoint/step-24", by_hand / "checkpoint/step-24")

    (folder / f"notes{ranks}").mkdir()
    job = start_on_ranks(
        killed,
        ranks=ranks,
        config=folder / "staged.toml",
        script=ROOT / "tests/helpers/hashing_train.py",
        NOTES=folder / f"notes{ranks}",
        HOLD_AFTER=8,  # by its count, step 12 of the job: 64 samples, and 4 x 16
    )
    wait_for(lambda: [*commit.saved_steps(killed / "checkpoint")][-1:] == [10], "step 10")
    wait_for(lambda: records(killed)[-1]["step"] == 12, "step 12")
    job.ranks[0].send_signal(signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL
    elsewhere = shutil.copytree(killed, folder / f"elsewhere{ranks}")
    train(folder / "staged.toml", killed, ranks)
    assert losses(killed) == want
    assert_same_tensors(killed / "checkpoint/step-24", by_hand / "checkpoint/step-24")

    train(folder / "staged.toml", elsewhere, 3 - ranks)
    assert_close(losses(elsewhere), want)
