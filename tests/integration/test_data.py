"""The data of a job, on real processes: faulty, used up, tokenised by several.

Killed and resumed on other meshes: test_data_order.py, test_stages.py.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from meshwright.checkpoint import listing
from meshwright.checkpoint.manifest import read_manifest
from tests.helpers.cli import command
from tests.helpers.files import flip_bit
from tests.helpers.forked import Forked
from tests.helpers.jobs import (
    CONFIG,
    ROOT,
    ended,
    environment,
    records,
    train_alone,
    train_on_ranks,
    wait_for,
)
from tests.helpers.server import Server

WORDS = ("sun", "rose", "over", "seven", "hills", "while", "nobody", "watched", "the", "road")


def write_texts(folder: Path, seed: int, num_files: int, per_file: int) -> None:
    """JSON lines of made-up text, from one word to two hundred."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(num_files):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 200))) for _ in range(per_file)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / f"{number}.jsonl").write_text("".join(lines))


def test_a_hub_that_does_not_answer_is_no_mistake_of_the_config(tmp_path: Path) -> None:
    """A scheduler starts a job again on exit code 5, and not on 2."""
    server = Server()
    server.faults = itertools.repeat("425")  # to try again later, which no client waits for
    variables = {"HF_HUB_OFFLINE": 0, "HF_HOME": tmp_path / "home", "NO_PROXY": "127.0.0.1"}
    variables |= {"HF_ENDPOINT": server.address}
    words = ["train", CONFIG, f"--job.dump_folder={tmp_path}/out", "--ngpu=2"]
    words.append("--training.dataset=someone/something")
    launcher = Forked([ROOT / "meshwright/commands/main.py", *words], environment(**variables))
    job = ended(launcher.wait(), 5)
    server.close()
    assert "training.dataset = 'someone/something': cannot be read now: " in job.stderr
    assert "fix: run the same command again when the network" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.slow
def test_a_bad_line_saves_and_may_be_passed_over(tmp_path: Path) -> None:
    """On two ranks, of which one meets it; then on one, with and without leave to pass over it."""
    write_texts(tmp_path / "data", 2, 2, 60)
    lines = (tmp_path / "data/1.jsonl").read_text().splitlines()
    lines[20] = '{"text": "cut sh'
    (tmp_path / "data/1.jsonl").write_text("\n".join(lines) + "\n")
    options = (
        *("--training.dataset", "json", "--training.dataset_path", tmp_path / "data"),
        *("--training.dataset_mode", "streamed", "--training.stream_shards", 2),
        *("--training.shuffle_window", 4, "--training.steps", 40),
        *("--training.local_batch_size", 1),  # so that each of two ranks reads one shard
    )
    folder = tmp_path / "out"
    result = train_on_ranks(folder, *options, code=5)
    assert "Traceback" not in result.stdout + result.stderr
    (step,) = {row["step"] for row in records(folder)[-1:]}
    place = f"{tmp_path}/data/1.jsonl:21: not JSON"
    assert f"the data cannot be read after step {step}: rank 1: {place}" in result.stdout
    assert listing.saved_steps(folder / "checkpoint")[-1] == step

    again = train_alone(folder, *options, code=2)  # a scheduler would go in circles
    assert "not JSON" in again.stderr
    assert listing.saved_steps(folder / "checkpoint")[-1] == step

    leave = ("--training.max_bad_records", 1)
    result = train_alone(folder, *options, *leave)
    assert f"skipped a record (1): {place}" in result.stdout
    assert records(folder)[-1]["data/bad_records"] == 1


def test_a_validation_that_fails_costs_no_step(tmp_path: Path) -> None:
    """One of two ranks reads a damaged block, in the middle of a job."""
    folder, cache = tmp_path / "out", tmp_path / "cache"
    write_texts(tmp_path / "train", 2, 2, 60)
    write_texts(tmp_path / "validation", 3, 1, 60)
    options = (
        *("--training.dataset", "json", "--training.dataset_path", tmp_path / "train"),
        *("--validation.dataset", "json", "--validation.dataset_path", tmp_path / "validation"),
        *("--validation.enable", "--validation.freq", 3, "--validation.num_samples", 64),
        *("--training.steps", 6, "--checkpoint.interval", 100),
        *("--training.token_cache_folder", cache),
    )
    command("tokenize")(["--job.config_file", CONFIG, *options])
    sizes = {path: path.stat().st_size for path in cache.rglob("*/00000.tokens")}
    flip_bit(min(sizes, key=sizes.__getitem__), 8 * 70)
    result = train_on_ranks(folder, *options, code=5)
    # of two ranks that meet it, one may find it forgotten by the other
    assert "run the same command again: it checks this part, and repairs it" in result.stdout
    assert listing.saved_steps(folder / "checkpoint") == [3]
    train_alone(folder, *options)
    assert "validation/loss" in records(folder)[-1]
    manifest = read_manifest(listing.step_folder(folder / "checkpoint", 6))
    assert manifest.get("validation_content", {}).keys() == {"json"}
    # on which tokens and places in streamed data depend
    packages = {name: version(name) for name in ("tokenizers", "datasets")}
    assert packages.items() <= manifest["versions"].items()


def test_a_streamed_validation_that_asks_for_too_much_is_found_at_start(tmp_path: Path) -> None:
    write_texts(tmp_path / "data", 3, 1, 20)
    result = train_alone(
        tmp_path / "out",
        *("--validation.enable", "--validation.dataset", "json", "--validation.num_samples", 5000),
        *("--validation.dataset_path", tmp_path / "data", "--validation.dataset_mode", "streamed"),
        code=2,
    )
    assert "validation.num_samples = 5000: json holds fewer" in result.stderr
    assert records(tmp_path / "out") == []


def tokenize(cache: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "meshwright.commands.main", "tokenize", *arguments),
            *("--job.config_file", str(CONFIG)),
        ],
        env=environment(XDG_CACHE_HOME=cache, PYTHONPATH=ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(tmp_path) -> None:
    process = tokenize(tmp_path, "--workers", "2")
    wait_for(lambda: list(tmp_path.glob("*/*/*.tokens")), "a part", 60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    def is_over() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_over, "the end of its workers", 30)


def test_too_little_data_is_one_error(tmp_path) -> None:
    """Once, though two ranks meet it; other faults are in tests/unit/test_sources.py."""
    (tmp_path / "a.jsonl").write_text('{"text": "too short"}')
    dataset = ("--training.dataset", "json", "--training.dataset_path", tmp_path / "a.jsonl")
    result = train_on_ranks(tmp_path / "out", *dataset, code=2)
    assert result.stderr.count("give 0 samples of 65, and 1 are needed") == 1
    assert not (tmp_path / "out").exists()


def test_a_part_is_held_out_and_a_bad_line_of_a_cache_passed_over(tmp_path: Path) -> None:
    """By two ranks and by one: the same losses of both parts."""
    write_texts(tmp_path / "data", 3, 2, 60)
    with open(tmp_path / "data/1.jsonl", "a") as file:
        file.write('{"text": "cut sh\n')
    options = (
        *("--training.dataset", "json", "--training.dataset_path", tmp_path / "data"),
        *("--training.validation_fraction", 0.3, "--training.steps", 3),
        *("--validation.enable", "--validation.dataset", "", "--validation.freq", 3),
        *("--validation.num_samples", -1, "--training.token_cache_folder", tmp_path / "cache"),
        *("--training.global_batch_size", 16, "--training.local_batch_size", 4),
    )
    refused = train_alone(tmp_path / "rejected", *options, code=2)
    assert "1.jsonl:61: not JSON" in refused.stderr
    found = []
    for name, train in ("two", train_on_ranks), ("one", train_alone):
        train(tmp_path / name, *options, "--training.max_bad_records", 1)
        found.append(
            [records(tmp_path / name)[-1][key] for key in ("loss/train", "validation/loss")]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(list((tmp_path / "cache").glob("json-*/cache.npz"))) == 2


def test_an_epoch_limit_ends_the_job_in_order(tmp_path) -> None:
    write_texts(tmp_path / "data", 2, 1, 40)
    arguments = (
        *("--training.dataset", "json", "--training.dataset_path", tmp_path / "data"),
        *("--training.max_epochs", 1, "--training.steps", 1000),
        *("--lr_scheduler.warmup_steps", 200),
        "--checkpoint.last_save_model_only",
    )
    result = train_on_ranks(tmp_path / "out", *arguments)
    last = records(tmp_path / "out")[-1]
    assert 3 < last["step"] < 100
    assert 1 - 8 / (8 * last["step"]) < last["data/epochs/json"] <= 1
    assert (tmp_path / "out/checkpoint" / f"step-{last['step']}").exists()
    assert "the data ends here" in result.stdout
    reason = "finished: the data ends here: training.max_epochs = 1"
    assert records(tmp_path / "out", "history")[-1]["reason"] == reason
    log = (tmp_path / "out/logs/rank_0.log").read_text()
    assert log.count(f"ended after step {last['step']}: {reason}") == 1
    assert f"in {last['step']} steps, " in result.stdout  # not the thousand
    assert "epochs (training.max_epochs = 1)" in result.stdout
    assert f"is never reached: lr_scheduler.warmup_steps = 200, and the job has {last['step']}" in (
        " ".join(result.stdout.split())
    )
    assert last["optim/lr"] == pytest.approx(4e-3 * last["step"] / 200)
    again = train_alone(tmp_path / "out", *arguments)
    assert f"holds step {last['step']}, where the data ends" in again.stdout
    assert len(records(tmp_path / "out")) == last["step"]
    again = train_alone(
        *(tmp_path / "out", *arguments),
        *("--checkpoint.exclude_from_loading", '["dataloader", "optimizer"]'),
    )
    assert records(tmp_path / "out")[-1]["step"] == 2 * last["step"]
    assert f"of {2 * last['step']}, " in again.stdout
    with open(tmp_path / "data" / "0.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    other = train_alone(tmp_path / "out", *arguments, code=2)
    assert "its content is not what it was when the checkpoint was saved" in other.stderr


def test_a_validation_by_few_samples_has_some_of_every_file(tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(f"{letter} " * 3000)
    paths = {"a": "a.txt", "b": "b.txt", "all": "*.txt"}
    tables = (
        f"{{name='{n}', dataset='text', dataset_path='{tmp_path / p}'}}" for n, p in paths.items()
    )
    result = train_alone(
        tmp_path / "out",
        *("--validation.enable", "--validation.num_samples", 8, "--training.steps", 1),
        f"--validation.datasets=[{', '.join(tables)}]",
    )
    assert "validation/b: loss " in result.stdout
    last = records(tmp_path / "out")[-1]
    a, b, of_all = (last[f"validation/{name}/loss"] for name in paths)
    assert min(a, b) + 1e-3 < of_all < max(a, b) - 1e-3


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_error(tmp_path) -> None:
    rng = random.Random(0)
    texts = (" ".join(rng.choices(WORDS, k=200)) * 20 for _ in range(3000))  # seconds of work
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    process = tokenize(
        tmp_path / "cache",
        *("--workers", "3", "--training.dataset", "json", "--training.dataset_path", str(data)),
    )

    def workers() -> list[int]:
        """Once both are at work."""
        files = (tmp_path / "cache").glob("*/*/*.unfinished")
        pids = {int(file.name.split(".")[-2]) for file in files} - {process.pid}
        return [*pids] if len(pids) == 2 else []

    os.kill(wait_for(workers, "two workers", 60)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "a process that tokenized was killed" in output
    assert "Traceback" not in output
