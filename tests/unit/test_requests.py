"""A rank is asked to stop where it has nothing to save, in processes of their own."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.system.errors import EXIT_CODES, ConfigError, SaveError
from meshwright.system.processes import STOP, TRAINED, Launch, Requests
from meshwright.train import main as rank_main
from tests.helpers.forked import Forked

RANK = """
import os, signal, subprocess, sys, time
from meshwright.system import processes as process
process.STUCK_S = process.JOIN_TIMEOUT_S = 0.5
with process.Requests({mode!r}, {launcher!r}) as requests:
    try:
        {work}
    except process.StopRequested as asked:
        print("raised", asked, requests.exit_code)
"""
SLEEP = "print('ready', flush=True); time.sleep(20)"
HELD = """
        with requests.held():
            print('ready', flush=True)
            while not requests.name: time.sleep(0.01)
            time.sleep(1)  # longer than a rank that is stuck may take
        print("saved", requests.has_trained)
        requests.check()
"""
# of one call without Python, of some seconds
STUCK = """
        print('ready', flush=True)
        import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 8_000_000)
"""
CHILD = """
        child = os.fork()
        if not child:
            time.sleep(20)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), requests.name)
"""


def rank(folder: Path, work: str, *numbers: int, mode: str = "raise", **given: str):
    """Exit code and output of a rank that gets signals; with `given`, of torchrun's."""
    launcher = str(folder) if given else ""
    (script := folder / "rank.py").write_text(RANK.format(mode=mode, work=work, launcher=launcher))
    process = Forked([script], os.environ | given)
    if numbers:
        process.wait_for_line("ready")
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.5 * (len(numbers) > 1))
    done = process.wait(timeout_s=20)
    return done.returncode, done.stdout.removeprefix("ready\n").strip()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGTERM, 75), (signal.SIGINT, 130)],
)
def test_a_request_ends_what_has_nothing_to_save(tmp_path: Path, number, code: int) -> None:
    assert rank(tmp_path, SLEEP, number) == (0, f"raised {number.name} {code}")


def test_it_ends_even_what_does_not_come_back_to_python(tmp_path: Path) -> None:
    assert rank(tmp_path, STUCK, signal.SIGTERM) == (75, "")
    assert rank(tmp_path, SLEEP, signal.SIGINT, mode="exit") == (130, "")  # torch is imported


def test_it_waits_for_what_there_is_to_save(tmp_path: Path) -> None:
    assert rank(tmp_path, HELD, signal.SIGTERM) == (0, "saved False\nraised SIGTERM 75")


def test_the_launcher_s_request_is_heard_but_torchrun_s_sigterm_is_none(tmp_path: Path) -> None:
    """It ends the ranks of a job that has failed."""
    ended = rank(tmp_path, SLEEP, signal.SIGTERM, TORCHELASTIC_RUN_ID="1")
    assert ended == (0, "raised SIGTERM 143")
    (tmp_path / STOP).write_text("SIGUSR1")
    assert rank(tmp_path, SLEEP, TORCHELASTIC_RUN_ID="1") == (0, "raised SIGUSR1 75")


def test_a_process_that_a_library_forks_ends_as_usual(tmp_path: Path) -> None:
    assert rank(tmp_path, CHILD) == (0, f"child {-signal.SIGTERM}")


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Requests() as requests:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests.name == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_launcher_is_told_of_the_first_step(tmp_path: Path) -> None:
    requests = Requests(folder=str(tmp_path))
    requests.note_training()
    assert requests.has_trained
    assert (tmp_path / TRAINED).exists()
    (tmp_path / STOP).write_text("SIGINT")
    assert requests.look() == "SIGINT"  # though nothing listens


@pytest.mark.parametrize(("local_rank", "waits"), [(0, 0), (1, 5)])
@pytest.mark.parametrize("kind", [ConfigError, SaveError])
def test_an_error_of_all_ranks_is_the_first_s_on_each_machine(
    kind, local_rank, waits, monkeypatch
) -> None:
    """A launcher whose rank waits would be left by the first machine's, and exit with 1."""
    launcher = {"RANK": local_rank + 2, "WORLD_SIZE": 4, "MASTER_ADDR": "::1", "MASTER_PORT": 1}
    for name, value in (launcher | {"LOCAL_RANK": local_rank}).items():
        monkeypatch.setenv(name, str(value))
    slept, codes = [0], []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("os._exit", codes.append)
    error = kind("", "wrong") if kind is ConfigError else kind("full")
    monkeypatch.setattr(rank_main, "_run_command_line", Mock(side_effect=error))
    rank_main.main(Launch(), Requests())
    assert (sum(slept), codes) == (waits, [EXIT_CODES[kind]])
