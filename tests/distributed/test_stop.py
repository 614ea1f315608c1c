"""One rank is asked to stop; all of them stop at the same step."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed as dist

from meshwright.checkpoint import listing
from meshwright.system.errors import EXIT_INTERRUPTED, StopRequested
from meshwright.system.log import log_to_console
from meshwright.system.processes import NUDGE, STOP, STOP_SIGNALS, Requests
from meshwright.train import job
from meshwright.train import stop as preemption
from meshwright.train.stop import PROFILE_FILE, STOP_FILE, StopAgreement, remove_stop_file
from tests.helpers.forked import Forked

ROOT = Path(__file__).parents[2]
STEPS = 400


def steps_until_stopped(folder: Path, way: str) -> tuple[int, str]:
    """Take steps that last a millisecond on rank 0 and three on rank 1; rank 1 is asked at its
    fifth."""
    rank = dist.get_rank()
    (from_launcher := folder / f"launcher_{rank}").mkdir()
    handled = (*STOP_SIGNALS, NUDGE)
    handlers = [signal.getsignal(number) for number in handled]
    step = 0
    with Requests(folder=str(from_launcher)) as requests, requests.held():
        agreement = StopAgreement(folder, 1 if way == "clock" and rank == 1 else 0, requests)
        while not agreement.receive().is_last(step) and step < (STEPS if way != "clock" else 10**6):
            step += 1
            agreement.send()
            time.sleep(0.001 + 0.002 * rank)
            if rank == 0 and step == 5 and way == "data":
                agreement.fail(OSError("gone later"), last_step=9)
            if rank == 1 and step == 5:
                if way == "file":
                    (folder / STOP_FILE).touch()
                elif way == "launcher":
                    (from_launcher / STOP).write_text("SIGTERM")
                elif way == "data":
                    agreement.fail(OSError("gone"), last_step=7)
                elif way != "clock" and way:
                    os.kill(os.getpid(), signal.Signals[way])
        agreement.receive()
        reason = agreement.decision.reason
        if reason:
            agreement.clear_stop_file()
        if failures := agreement.failures(step):
            reason = str(failures)
    assert [signal.getsignal(number) for number in handled] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    return step, reason


@pytest.mark.parametrize(
    ("way", "want"),
    [
        ("SIGUSR1", "SIGUSR1"),  # the others: tests/unit/test_requests.py
        ("launcher", "SIGTERM"),
        ("file", "STOP is there"),
        ("clock", "job.max_run_seconds = 1 are over"),
        ("", ""),  # who is not asked takes all steps
    ],
)
def test_all_ranks_stop_at_the_step_that_one_is_asked_at(on_ranks, tmp_path, way, want) -> None:
    (step, reason), (other_step, _) = on_ranks(2, _without_delay, tmp_path, way)
    assert reason.endswith(want) or way == "clock"
    assert step == other_step
    if way == "":
        assert (step, reason) == (STEPS, "")
    elif way != "clock":
        # a thread hears signals and the launcher, some steps of this loop later on a busy machine
        assert 5 <= step <= (7 if way == "file" else STEPS - 1)
    assert not (tmp_path / STOP_FILE).exists()


def _without_delay(folder: Path, way: str) -> tuple[int, str]:
    with patch.object(preemption, "LOOK_EVERY_S", 0.0):
        return steps_until_stopped(folder, way)


def test_all_ranks_stop_where_the_data_of_one_ends(on_ranks, tmp_path) -> None:
    """Said at step 5, of step 7; no rank waits for another, nor tells of what comes after it."""
    want = (7, "{1: RuntimeError('OSError: gone')}")
    assert on_ranks(2, _without_delay, tmp_path, "data") == [want, want]


@patch.object(preemption, "LOOK_EVERY_S", 0.01)
def steps_of_traces(folder: Path) -> list[int]:
    """Steps after which a trace is to begin; rank 0's folder gets the file twice."""
    traced, rank = [], dist.get_rank()
    agreement = StopAgreement(folder, 0, Requests())
    for step in range(1, 61):
        agreement.send()
        if rank == 0 and step in (3, 30):
            (folder / PROFILE_FILE).touch()
        time.sleep(0.001 + 0.002 * rank)
        agreement.receive()
        if agreement.takes_trace():
            traced.append(step)
    return traced


def test_all_ranks_trace_the_same_steps_once_per_request(on_ranks, tmp_path: Path) -> None:
    traced, other = on_ranks(2, steps_of_traces, tmp_path)
    assert traced == other
    assert len(traced) == 2
    assert 3 <= traced[0] < 30 <= traced[1]
    assert not (tmp_path / PROFILE_FILE).exists()


def test_the_first_rank_of_each_machine_removes_the_stop_file(
    tmp_path, monkeypatch, capsys
) -> None:
    """A folder of the machine's own may have one that no other sees."""
    monkeypatch.setattr(preemption, "dist", MagicMock(get_rank=lambda: 2))
    monkeypatch.setenv("RANK", "2")
    agreement = StopAgreement(tmp_path, 0, Requests())
    for local_rank, is_left in (("1", True), ("0", False)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        log_to_console(is_launched=True)
        for remove in (agreement.clear_stop_file, partial(remove_stop_file, tmp_path)):
            (tmp_path / STOP_FILE).touch()
            remove()
            assert (tmp_path / STOP_FILE).exists() == is_left
    assert capsys.readouterr().out.count("removed") == 1


ALONE = """
import os, signal, sys, time
from pathlib import Path
import torch
from meshwright.system import processes as process
from meshwright.train import stop as preemption
from meshwright.parallelisms.meshes import start_process_group
start_process_group(torch.device("cpu"), 60)
process.JOIN_TIMEOUT_S = 1
requests = process.Requests(folder=sys.argv[2])
agreement = preemption.StopAgreement(Path(sys.argv[1]), 0, requests)
with requests, requests.held():
    print("ready", flush=True)
    {work}
    agreement.send()
    print("asked" if agreement.receive().reason else "not asked", flush=True)
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""
# one call without Python, of up to some seconds: Python's own handlers wait until it is over
IN_C = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', {rounds})"
ASLEEP = "time.sleep(3)"


def signalled(folder: Path, work: str, *numbers: int, **variables: str) -> tuple[int, str]:
    """Exit code and output of a process that is sent `numbers` while it works."""
    script = folder / "alone.py"
    script.write_text(ALONE.format(work=work))
    process = Forked([script, folder, folder if variables else ""], os.environ | variables)
    process.wait_for_line("ready")
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)  # else the kernel makes one of two that are the same
    start = time.monotonic()
    done = process.wait(timeout_s=30)
    assert done.returncode == 0 or time.monotonic() - start < 2, "it ended of its own"
    assert ("the job saves and stops; again: killed" in done.stderr) == (signal.SIGINT in numbers)
    return done.returncode, done.stdout.removeprefix("ready\n")


# as if it came just then, while files are looked for and what was found is noted
IN_A_LOOK = """
    def look():
        agreement._look, before = lambda: None, agreement._asked
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        agreement._asked = max(before, 0)
    agreement._look = look
"""
FAILING = """
    def fail(*_, **__): raise OSError(116, "Stale file handle")
    os.stat = fail
"""


def test_a_signal_is_not_lost_and_a_failing_file_system_ends_nothing(tmp_path: Path) -> None:
    assert signalled(tmp_path, IN_A_LOOK) == (0, "asked\n")
    assert signalled(tmp_path, FAILING) == (0, "not asked\n")


def test_a_second_ctrl_c_alone_ends_a_rank_at_once_whatever_it_does(tmp_path: Path) -> None:
    short, long = IN_C.format(rounds=2_000_000), IN_C.format(rounds=8_000_000)
    assert signalled(tmp_path, short, signal.SIGTERM) == (0, "asked\n")
    assert signalled(tmp_path, long, signal.SIGINT, signal.SIGINT) == (EXIT_INTERRUPTED, "")
    # Slurm's warning and its end; a terminal that closes, and its shell
    for several in ((signal.SIGUSR1, signal.SIGTERM), (signal.SIGHUP, signal.SIGHUP)):
        assert signalled(tmp_path, short, *several) == (0, "asked\n")


def test_a_rank_of_a_job_that_has_failed_ends_soon(tmp_path: Path) -> None:
    """As torchrun sees to: but if the launcher was asked to stop, it is no failure."""
    failed = {"TORCHELASTIC_RUN_ID": "1"}
    assert signalled(tmp_path, ASLEEP, signal.SIGTERM, **failed) == (128 + signal.SIGTERM, "")
    (tmp_path / STOP).write_text("SIGTERM")
    assert signalled(tmp_path, ASLEEP, signal.SIGTERM, **failed) == (0, "asked\n")


STOPPED_SOON = """
import os, sys
from pathlib import Path
from meshwright.train import stop as preemption
from meshwright.config.loader import load_config
from meshwright.system.errors import TrainingError
from tests.helpers.resolved import resolved
from meshwright.train.job import run

class Stopper:
    def write(self, record): Path(sys.argv[1], "STOP").touch()
    def close(self): pass

if __name__ == "__main__":  # the job tokenises, by processes that import this again
    preemption.LOOK_EVERY_S = 0
    toml = "tests/integration/tiny.toml"
    words = ["--job.config_file", toml, "--job.dump_folder", *sys.argv[1:]]
    try:
        print("result", run(resolved(load_config(words), 1), [Stopper()]))
    except TrainingError as error:
        print("result", error)
    sys.stdout.flush()
    os._exit(0)
"""


def result_of_stopping(folder: Path, *overrides: str) -> str:
    (script := folder / "stopped_soon.py").write_text(STOPPED_SOON)
    done = Forked([script, folder, *overrides], os.environ, cwd=ROOT).wait()
    assert done.returncode == 0, done.stderr
    assert not (folder / STOP_FILE).exists()
    return "result " + done.stdout.rpartition("result ")[2].rstrip()


def test_what_would_not_go_on_is_not_said_to(tmp_path: Path) -> None:
    """Who starts a job again that exits with 75 would start these again for ever."""
    (tmp_path / STOP_FILE).touch()  # left by a job before: it does not stop this one before step 1
    lost = result_of_stopping(tmp_path, "--checkpoint.enable", "false")
    assert lost.startswith("result after step ")
    assert lost.endswith("STOP is there; nothing was saved, because checkpoint.enable = false")
    assert result_of_stopping(tmp_path) == "result False"
    (step,) = listing.saved_steps(tmp_path / "checkpoint")
    assert step > 0
    back = result_of_stopping(tmp_path, "--checkpoint.load_step", str(step))
    assert f"it is saved, but checkpoint.load_step = {step} would start from there again" in back


def test_a_rank_that_waits_for_one_that_was_asked_and_is_gone_ends_too(monkeypatch) -> None:
    """It made the agreement's group while requests were held, and was killed after 30 s."""

    def ask(*args: object) -> None:
        raise StopRequested(args[2].when_asked)

    monkeypatch.setattr(job, "StopAgreement", ask)
    for name in ("dist", "note_failure"):
        monkeypatch.setattr(job, name, MagicMock())
    with pytest.raises(StopRequested, match="raise"):
        job._train(MagicMock(), Requests(), 0.0)
    assert job.note_failure.return_value.__exit__.call_args.args[0] is StopRequested
