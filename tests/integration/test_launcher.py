"""The launcher on real processes: training, resuming, being killed, being told nonsense."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.lease import JobLease
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from tests.helpers.cli import check_job
from tests.helpers.files import tree
from tests.helpers.forked import Forked
from tests.helpers.jobs import (
    CONFIG,
    ROOT,
    assert_close,
    command,
    environment,
    launch,
    losses,
    ranks_of,
    records,
    train_alone,
    train_on_ranks,
    wait_for,
)
from tests.helpers.slow import slow

DOOR = ROOT / "meshwright/launch/__main__.py"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """20 steps on two ranks in one go; on the threads that ranks without the launcher get."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    result = launch(folder, OMP_NUM_THREADS=1)
    (folder / "console.txt").write_text(result.stdout)
    return folder


def test_a_run_learns_and_leaves_what_was_promised(uninterrupted: Path) -> None:
    rows = records(uninterrupted)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert set(rows[0]) == {
        *("step", "loss/train", "optim/grad_norm", "optim/lr", "memory/peak_gib", "data/tokens"),
        *("time/wps", "time/tflops", "time/step_s", "time/data_s"),
        *("time/forward_backward_s", "time/communication_s", "time/optimizer_s"),
        "data/epochs/sympy_source",
    }
    assert rows[0]["loss/train"] - rows[-1]["loss/train"] > 1.0
    assert rows[-1]["data/tokens"] == 20 * 8 * 64
    assert rows[3]["optim/lr"] == pytest.approx(4e-3 * 4 / 5)
    assert all(row["time/tflops"] > 0 and row["memory/peak_gib"] > 0.1 for row in rows)
    assert listing.saved_steps(uninterrupted / "checkpoint") == [15, 20]  # k = 2
    console = (uninterrupted / "console.txt").read_text()
    for word in ("step 20/20", "loss", "grad_norm", "lr", "wps", "mfu", "TFLOP/s", "GiB", "eta"):
        assert word in console
    assert "peak for mfu" not in console  # a CPU has no data sheet
    assert "global batch: 8 sequences, 512 tokens" in console
    assert "to train: 10,240 tokens in 20 steps" in console
    assert "finished: 10,240 tokens in 0:0" in console
    assert f"meshwright report {uninterrupted}" in console
    assert "[rank0]" not in console
    assert (uninterrupted / "logs" / "rank_1.log").read_text()
    written = load_config([str(uninterrupted / "config.toml")])
    assert written.parallelism.data_parallel_shard_degree == -1
    assert written.training.global_batch_size == 8
    text = (uninterrupted / "config.toml").read_text()
    assert "data_parallel_shard_degree = -1  # 2 on 2 ranks" in text
    events = EventAccumulator(str(uninterrupted / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("Loss/train")] == list(range(1, 21))
    assert events.Scalars("Loss/train")[-1].value == pytest.approx(rows[-1]["loss/train"])


def test_a_finished_run_says_so_and_can_be_extended(uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_text()
    result = train_alone(uninterrupted)
    assert "nothing to do" in result.stdout
    assert "raise training.steps" in result.stdout
    assert (uninterrupted / "metrics.jsonl").read_text() == before


def test_check_says_what_is_left_to_train(uninterrupted: Path, capsys) -> None:
    words = [CONFIG, "--ngpu", 2, "--job.dump_folder"]
    check_job([*words, uninterrupted])
    said = "".join(capsys.readouterr().out.split())
    last = f"{uninterrupted / 'checkpoint'} holds step 20, the last {CONFIG} has nothing to do"
    assert said.endswith(last.replace(" ", ""))
    check_job([*words, uninterrupted, "--training.steps", 23])
    assert re.search(r", 3 steps of \d+ tokens after step 20$", capsys.readouterr().out.strip())


@pytest.mark.slow
def test_a_job_that_saves_nothing_shares_checkpoints_and_no_records(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/checkpoint").symlink_to(tmp_path / "checkpoint")
    lease = JobLease(tmp_path / "checkpoint")
    lease.take()
    words = ("--checkpoint.load_only", "--training.steps", 1)
    train_alone(tmp_path / "mine", *words)
    assert "another job uses" in train_alone(tmp_path, *words, code=2).stderr
    lease.give_back()


def test_loss_does_not_depend_on_the_number_of_ranks(uninterrupted: Path, tmp_path: Path) -> None:
    """fp32, 1 rank x 2 microbatches against 2 ranks: the same 20 global batches."""
    idle = (
        *("--parallelism.enable_async_tensor_parallel", "--bad_steps.budget", 3),
        *("--parallelism.module_fqns_per_model_part", '[["tok_embeddings"], ["norm"]]'),
    )
    result = train_alone(tmp_path / "out", "--training.local_batch_size", 4, *idle)
    assert result.stdout.count(" has no effect: ") == 3
    assert result.stdout.count("bad_steps.budget = 3 has no effect: ") == 1
    details = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    assert "config, where it differs from the defaults:" in details
    assert_close(losses(tmp_path / "out"), losses(uninterrupted))


def test_a_resume_may_leave_out_the_place_in_the_data_and_the_optimizer(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(uninterrupted, folder)
    options = ("--checkpoint.exclude_from_loading", '["dataloader", "optimizer"]')
    result = train_alone(folder, *options, "--checkpoint.load_step", 15, "--training.seed", 1)
    for part in ("dataloader", "optimizer"):
        assert f"{part} is left out: checkpoint.exclude_from_loading" in result.stdout
    manifest = integrity.inspect(listing.step_folder(folder / "checkpoint", 20))
    assert manifest["data"]["sample"] == 5 * 8
    assert manifest["tokens_seen"] == 20 * 8 * 64
    rows, before = records(folder), records(uninterrupted)
    assert [row["optim/lr"] for row in rows] == [row["optim/lr"] for row in before]
    assert rows[14] == before[14]
    assert rows[15]["data/epochs/sympy_source"] < before[0]["data/epochs/sympy_source"] * 1.01
    assert rows[-1]["loss/train"] < before[0]["loss/train"] - 0.5


def test_another_model_or_order_in_the_same_folder_is_refused(uninterrupted: Path) -> None:
    """By the check, which every launcher begins with, and by a rank without ours."""
    before, steps = tree(uninterrupted), ("--training.steps", "30")
    with pytest.raises(ConfigError, match="model.args.dim = 64: checkpoint .* was saved with"):
        check_job([CONFIG, "--job.dump_folder", uninterrupted, *steps, "--model.args.dim=64"])
    result = train_alone(uninterrupted, "--training.seed", 1, *steps, code=2)
    assert "training.seed = 1: checkpoint" in result.stderr
    assert "was saved with" in result.stderr
    assert tree(uninterrupted) == before


@pytest.mark.slow
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        command(folder, "--training.steps", 100000),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and records(folder), "the first step")
        wait_for(lambda: len(ranks_of(folder)) == 2, "two ranks")
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not ranks_of(folder), "the end of the ranks", seconds=30)


def press_ctrl_c(folder: Path, times: int) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a job whose terminal does that during training, after it
    was asked for its stacks."""
    console = folder.with_suffix(".log")
    with console.open("w") as output:
        process = subprocess.Popen(
            command(folder, "--training.steps", 100000, "--metrics.log_freq", 100000),
            env=environment(),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # as a terminal's, which sends it to every process of the group
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and records(folder), "the first step")
        # a file gets its line at once, too, though none follows that would fill a block
        wait_for(lambda: "loss" in console.read_text(), "the line of the first step", seconds=3)
        check_stacks(process, folder)
        start = time.monotonic()
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # on a machine that was too slow, it trains on
    return process.returncode, errors, time.monotonic() - start


@pytest.mark.parametrize("times", [1, *slow(2)])
def test_ctrl_c_saves_and_stops_and_a_second_ends_the_job_at_once(tmp_path, times) -> None:
    folder = tmp_path / "out"
    code, errors, seconds = press_ctrl_c(folder, times)
    said = ["meshwright: SIGINT: the job saves and stops; again: killed"]
    if times == 2:
        said += ["meshwright: SIGINT: killed; the steps since the last checkpoint are lost"]
        assert seconds < 5
        assert not ranks_of(folder)
    else:
        (*_, step) = listing.saved_steps(folder / "checkpoint")
        assert step == max(losses(folder)) > 1
    assert code == (75, 130)[times - 1]
    assert errors.splitlines()[times - 1 :] == said[times - 1 :]


def check_stacks(process: subprocess.Popen, folder: Path) -> None:
    """SIGUSR2 to the launcher and its ranks: each rank writes its stacks, and trains on."""
    for number in (process.pid, *ranks_of(folder)):
        os.kill(number, signal.SIGUSR2)
    for rank in (0, 1):
        log = folder / "logs" / f"rank_{rank}.log"
        wait_for(lambda log=log: "most recent call first" in log.read_text(), "stacks")
        assert ", line " in log.read_text()
    assert process.poll() is None


BUFFERED = """
import sys

class Buffered:
    def __init__(self, folder):
        self.folder, self.steps = folder, []

    def write(self, record):
        self.steps.append(record["step"])

    def close(self):
        text = f"{self.steps}, failed: {sys.exception() is not None}"
        (self.folder / "buffered").write_text(text)

SINKS = {"buffered": lambda config, folder: Buffered(folder)}
"""

EARLY = ("--optimizer.early_step_in_backward", "--training.max_norm", "inf")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ((), "; the weights are as they were after step 1"),
        (EARLY, "; that step may have updated a part of the weights"),
    ],
    ids=["", "early"],
)
def test_a_loss_that_is_not_finite_stops_the_run(words, left, tmp_path: Path) -> None:
    """And its loggers are closed: the last records before a failure matter most."""
    folder, module = tmp_path / "out", tmp_path / "mine.py"
    module.write_text(BUFFERED)
    wild = ("--optimizer.lr", "1e30", "--lr_scheduler.warmup_steps", 0)
    words = (*wild, *words, "--experimental.custom_import", module)
    result = train_alone(folder, *words, code=3)
    assert (folder / "buffered").read_text() == "[1], failed: True"
    assert "non-finite gradient norm (every loss was finite) at step 2" in result.stdout
    assert f"at step 2{left}" in result.stdout
    assert result.stderr == ""
    assert list(losses(folder)) == [1]
    assert not (folder / "checkpoint").exists()


def test_a_rank_refuses_before_anything_is_written(tmp_path: Path) -> None:
    """What torch or the device alone know, and other launchers than ours do not look at. Though
    both ranks find it, it is said once. Of the device: tests/unit/test_hardware.py."""
    words = ("--activation_checkpoint.saved_ops", '["aten.mmm"]')
    result = train_on_ranks(tmp_path / "out", *words, code=2)
    assert "activation_checkpoint.saved_ops = 'aten.mmm': torch" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_bad_config_is_one_line_and_no_rank(tmp_path: Path) -> None:
    """The rest of what can be wrong is in tests/unit/test_config.py, without the launcher."""
    result = launch(tmp_path / "out", "--training.step", "3", code=2)
    assert result.stdout == ""
    assert result.stderr == (
        "meshwright: --training.step: unknown key training.step\n"
        "  fix: did you mean training.steps?\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_bf16_recomputation_and_traces_in_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    train_alone(
        folder,
        *("--training.mixed_precision_param", "bfloat16", "--training.steps", 12),
        *("--activation_checkpoint.mode", "selective", "--training.deterministic"),
        *("--profiling.enable_profiling", "--metrics.log_freq", 5),
    )
    assert [row["step"] for row in records(folder)] == [1, 5, 10, 12]
    assert losses(folder)[12][0] < losses(folder)[1][0] - 0.5
    trace = folder / "profile_traces" / "step_10" / "rank_0.json"
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_a_validation_that_is_the_best_so_far_is_saved_and_texts_are_written(tmp_path) -> None:
    """Between two saves of the interval; this job gets better all the time."""
    folder = tmp_path / "out"
    train_alone(
        folder,
        *("--validation.enable", "--validation.freq", 3, "--validation.num_samples", 8),
        *("--validation.sample_prompts", '["def "]', "--validation.sample_tokens", 5),
        *("--checkpoint.keep_best", "--checkpoint.interval", 100, "--training.steps", 9),
    )
    rows = [row for row in records(folder) if "validation/loss" in row]
    found = [row["validation/loss"] for row in rows]
    assert found == sorted(found, reverse=True)
    assert rows[-1]["validation/perplexity"] == pytest.approx(math.exp(found[-1]))
    # bytes a token
    assert 2 < found[-1] / math.log(2) / rows[-1]["validation/bits_per_byte"] < 4
    texts = records(folder, "samples")
    assert [(row["step"], row["prompt"]) for row in texts] == [(n, "def ") for n in (3, 6, 9)]
    assert all(row["text"].startswith("def") for row in texts)
    assert listing.saved_steps(folder / "checkpoint") == [6, 9]
    assert json.loads((folder / "checkpoint" / "best.json").read_text())["step"] == 9


FAILING = """
import os
from torch.optim import Optimizer

def zero_grad(*_):
    raise ArithmeticError("of a test")

if os.environ.get("RANK") == "1":
    Optimizer.zero_grad = zero_grad
"""


@pytest.mark.slow
def test_the_traceback_of_a_rank_that_fails_is_shown(tmp_path: Path) -> None:
    """Of rank 1, whose console is not shown."""
    (tmp_path / "mine.py").write_text(FAILING)
    words = ("--experimental.custom_import", tmp_path / "mine.py")
    result = launch(tmp_path / "out", *words, code=1)
    assert "meshwright: rank 1 failed (exit 1)" in result.stderr
    assert "ArithmeticError: of a test" in result.stderr


@pytest.mark.slow
def test_two_machines_meet_and_train_as_one(uninterrupted: Path, tmp_path: Path) -> None:
    """Two launchers with a rank each, on the address that a cluster's machines would share."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    folder = tmp_path / "out"
    variables = environment(NNODES=2, NGPU=1, RDZV_ENDPOINT=endpoint)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launchers = [subprocess.Popen(command(folder), env=variables, **pipes) for _ in range(2)]
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert_close(losses(folder), losses(uninterrupted))  # other threads a rank, other rounding


PEER = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    os._exit(int(sys.argv[1]))
time.sleep(60)
"""


def test_a_rank_that_fails_is_the_cause_though_others_have_to_be_stopped(tmp_path) -> None:
    """On GPUs the others wait in a collective."""
    script = tmp_path / "train.py"
    script.write_text(PEER)
    torchrun = ["--standalone", "--nnodes", "1", "--nproc-per-node", "2", str(script)]
    jobs = {code: Forked([DOOR, *torchrun, code], environment()) for code in (1, 2, 3)}
    for code, job in jobs.items():
        done = job.wait()
        assert done.returncode == code
        assert ("rank 1 failed (exit 1)" in done.stderr) == (code == 1)


ABORTED = """
import os, time
if os.environ["RANK"] == "1":
    os.write(2, b"watchdog: a collective timed out\\n")
    os.abort()
time.sleep(60)
"""


@pytest.mark.slow
def test_the_stderr_of_a_rank_that_cpp_ends_is_kept_and_shown(tmp_path: Path) -> None:
    """As NCCL's watchdog does. The console of rank 1 is not shown."""
    script, folder = tmp_path / "train.py", tmp_path / "out"
    script.write_text(ABORTED)
    torchrun = [
        "--standalone",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--local-ranks-filter",
        "0",
        "--tee",
        "3",
    ]
    words = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(folder)]
    result = Forked([DOOR, *torchrun, script, *words], environment()).wait()
    assert result.returncode == 128 + signal.SIGABRT
    assert "the end of rank 1's stderr" in result.stderr
    kept = (folder / "logs" / "stderr_1.log").read_text()
    where = f'File "{script}", line 5'
    for line in ("watchdog: a collective timed out", "Fatal Python error: Aborted", where):
        assert line in kept
        assert line in result.stderr
    assert (folder / "logs" / "stderr_0.log").read_text() == ""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_records_but_no_steps(tmp_path: Path) -> None:
    """Its few pages are used up after some steps, or before the first."""
    steps, folder = 80, tmp_path / "out"
    options = (
        *("--training.steps", steps, "--checkpoint.enable", "false"),
        *("--bad_steps.policy", "skip"),
    )
    for size in ("64k", "4k"):
        with small_disk(folder, size):
            result = train_alone(folder, *options)
            assert result.stderr == ""
            assert f"step {steps}/{steps}" in result.stdout
            for name in ("metrics.jsonl", "for TensorBoard,", "rank_0.log"):
                said = [line for line in result.stdout.splitlines() if f"{name} cannot be" in line]
                assert len(said) == 1, (name, result.stdout)
                assert "No space left on device" in said[0]
            if size == "4k":
                assert "config.toml cannot be written: [Errno 28]" in result.stdout
                continue
            written = losses(folder)  # every line is whole
            assert list(written) == list(range(1, len(written) + 1))
            assert 1 < len(written) < steps
            events = EventAccumulator(str(folder / "tb"))
            events.Reload()
            assert 1 < len(events.Scalars("Loss/train")) < steps
        folder.rmdir()
