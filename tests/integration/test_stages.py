"""A job of three stages equals three jobs joined by hand, to the bit, also through a kill; and on
other ranks, up to rounding. One of its sources is streamed."""

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint import listing
from meshwright.config.loader import load_config
from tests.helpers.compare_checkpoints import assert_same_tensors
from tests.helpers.files import flip_bit
from tests.helpers.forked import Forked
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
stream_shards = 4
shuffle_window = 3
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
dataset_mode = "{mode}"
weight = {weight}
"""


def source(name: str, weight: float, where: str = "") -> str:
    mode = "streamed" if name == "a" else "cached"
    return SOURCE.format(name=name, weight=weight, where=where, mode=mode)


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


def train(config: Path, out: Path, ranks: int, *words: str) -> None:
    train_on_ranks(out, *words, ranks=ranks, config=config)


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

    later = ("--checkpoint.async_mode", "thread")
    job = start_on_ranks(
        killed,
        *later,
        ranks=ranks,
        config=folder / "staged.toml",
        script=ROOT / "tests/helpers/holding_train.py",
        HOLD_AFTER=8 * 8 + 4 * 16,  # samples, of 12 steps
    )
    wait_for(lambda: [*listing.saved_steps(killed / "checkpoint")][-1:] == [10], "step 10")
    wait_for(lambda: records(killed)[-1]["step"] == 12, "step 12")
    job.ranks[0].send_signal(signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL
    elsewhere = shutil.copytree(killed, folder / f"elsewhere{ranks}")
    train(folder / "staged.toml", killed, ranks, *later)
    assert losses(killed) == want
    assert_same_tensors(killed / "checkpoint/step-24", by_hand / "checkpoint/step-24")

    train(folder / "staged.toml", elsewhere, 3 - ranks)
    assert_close(losses(elsewhere), want)


ALONE = """
import os, sys
from meshwright.config.loader import load_config
from meshwright.system.log import log_to_console
from meshwright.system.processes import Requests
from meshwright.train import set_up
from meshwright.train.job import run
from tests.helpers.resolved import resolved_on_rank

class Stop:
    def write(self, record):
        if record["step"] == int(os.environ.get("ASK_AFTER", 0)):
            requests.name = "SIGTERM"  # the vote during the next step hears of it

    def close(self):
        files = (os.path.realpath(file.path) for file in os.scandir("/proc/self/fd"))
        print("sockets", sum("socket:" in file for file in files))

if __name__ == "__main__":  # the job tokenises, by processes that import this again
    log_to_console()
    made, build = [], set_up.build_meshes
    set_up.build_meshes = lambda *given: made.append(given) or build(*given)
    plan = resolved_on_rank(load_config(["--job.config_file", *sys.argv[1:]]), 1)
    with Requests() as requests:
        print("result", run(plan, [Stop()], requests), "meshes", len(made))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture
def alone(folder: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the staged job in one process, into `tmp_path`/out; returns its output."""
    (script := tmp_path / "alone.py").write_text(ALONE)
    paths = {"--job.dump_folder": "out", "--training.token_cache_folder": "caches"}
    words = [word for key, name in paths.items() for word in (key, tmp_path / name)]

    def start(*more: object, **variables: object) -> str:
        command = [script, folder / "staged.toml", *words, *more]
        done = Forked(command, os.environ | variables, cwd=ROOT).wait()
        return done.stdout + done.stderr

    return start


@pytest.mark.slow
def test_a_stop_at_the_end_of_a_stage(alone: Callable[..., str], tmp_path: Path) -> None:
    out, steps = tmp_path / "out", [*range(1, 25)]
    output = alone(ASK_AFTER="7")
    assert "stopped after step 8 of 8: SIGTERM" in output, output
    assert "result False meshes 1\n" in output
    assert [row["step"] for row in records(out)] == steps[:8]
    output = alone("--training.steps", 17)
    assert "stage 2 of 3: steps 9 to 16" in output, output
    of_second, of_third = re.findall(r"^sockets (\d+)$", output, re.MULTILINE)
    assert int(of_third) <= int(of_second)  # with many ranks, many are open for each group
    shutil.rmtree(tmp_path / "caches")
    output = alone()
    assert "stage 3 of 3: steps 17 to 24" in output, output
    assert [row["step"] for row in records(out)] == steps
    assert len([*(tmp_path / "caches").iterdir()]) == 1  # the third stage has no source b
    starts = [row["is_new_stage"] for row in records(out, "history") if row["event"] == "start"]
    assert starts == [False, False, True, False]  # the second is of a new process
    # every value of the whole job
    written = load_config(["--job.config_file", str(out / "config.toml")])
    assert [stage.until_tokens for stage in written.training.stages] == [1000, 3072, None]
    assert (written.training.seq_len, written.training.steps) == (16, 24)


@pytest.mark.slow
def test_a_stage_whose_end_is_damaged_goes_on(alone: Callable[..., str], tmp_path: Path) -> None:
    """The newest checkpoint seems to end the stage; the one that is resumed from does not."""
    out = tmp_path / "out"
    output = alone(ASK_AFTER="7")
    assert "stopped after step 8 of 8: SIGTERM" in output, output
    (file,) = (out / "checkpoint/step-8").glob("*.distcp")
    flip_bit(file, file.stat().st_size // 2)
    output = alone("--training.steps", 17)
    assert "stage 1 of 3: steps 1 to 8" in output, output
    assert "result True meshes 1\n" in output, output
    assert losses(out).keys() == {*range(1, 18)}
