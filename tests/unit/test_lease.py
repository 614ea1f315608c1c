"""One job at a time writes to a folder of checkpoints, and one process to a part of a cache."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import filelock
import pytest

from meshwright.checkpoint import lease as job_lease
from meshwright.checkpoint import listing
from meshwright.checkpoint.lease import FILE, JobLease, TakenOverError, holder, holds
from meshwright.system import lease
from meshwright.system.errors import ConfigError
from meshwright.system.lease import Lease, is_gone, owner_of
from tests.helpers.checkpoints import publish
from tests.helpers.leases import FAR, rewrite

FAST = {"BEAT_S": 0.1, "LEASE_S": 0.6, "STUCK_S": 0.2, "POLL_S": 0.02}

OTHER = f"""
import sys, time
from pathlib import Path
from meshwright.checkpoint.lease import JobLease
from meshwright.system import lease
vars(lease).update({FAST})
job = JobLease(Path(sys.argv[1]))
job.take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch) -> None:
    for module, times in ((lease, FAST), (job_lease, {"GRACE_S": 0.3, "POLL_S": 0.02})):
        for name, seconds in times.items():
            monkeypatch.setattr(module, name, seconds)


@contextmanager
def another_job(folder: Path) -> Iterator[subprocess.Popen]:
    words = [sys.executable, "-c", OTHER, str(folder)]
    environment = os.environ | {"SLURM_JOB_ID": "77"}
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert job.stdout.readline() == "taken\n"
        yield job
    finally:
        job.kill()
        job.wait()


def leave_lease_of_a_killed_job(folder: Path) -> None:
    with another_job(folder) as job:
        job.kill()
        job.wait()


def test_a_job_that_runs_is_named_and_one_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with another_job(tmp_path) as job:
        begun = time.monotonic()
        with pytest.raises(ConfigError) as error:
            JobLease(tmp_path).take()
        assert error.value.key == "job.dump_folder"
        said = f"process {job.pid} on {os.uname().nodename} (job 77)"
        assert said in str(error.value)
        assert f"remove {tmp_path / FILE}" in str(error.value)
        while time.monotonic() - begun < 2 * FAST["LEASE_S"]:  # a living one outlives its lease
            assert not Lease(tmp_path / FILE).take()
        job.kill()
        job.wait()
        ours = JobLease(tmp_path)
        begun = time.monotonic()
        ours.take()
        assert time.monotonic() - begun < FAST["LEASE_S"] / 2
        assert owner_of(tmp_path / FILE).pid == os.getpid()
        assert holder(tmp_path) == f"process {os.getpid()} on {os.uname().nodename}"
        assert holds(tmp_path, ours.nonce)
        ours.give_back()
    assert not tmp_path.exists()  # it was empty again


def test_a_killed_job_whose_end_nobody_has_noticed_is_replaced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 600.0)
    with another_job(tmp_path) as job:
        rewrite(tmp_path / FILE, duration=600.0)
        job.send_signal(signal.SIGKILL)
        while not is_gone(owner_of(tmp_path / FILE)):  # its number is still its own
            time.sleep(0.01)
        ours = JobLease(tmp_path)
        ours.take()
        ours.give_back()


def test_a_killed_job_is_replaced_where_names_cannot_be_exchanged(tmp_path, monkeypatch) -> None:
    """As on NFS, where filelock itself waits for ever."""
    leave_lease_of_a_killed_job(tmp_path)
    monkeypatch.setattr(filelock.SoftFileLease, "_try_break_stale_lock", lambda lease: None)
    with pytest.raises(filelock.Timeout):
        filelock.SoftFileLease(tmp_path / FILE, lease_duration=0.6).acquire(timeout=0.9)
    rewrite(tmp_path / FILE, **FAR)  # of another node: it may run, until it is silent for long
    ours, begun = JobLease(tmp_path), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > FAST["LEASE_S"]
    ours.give_back()


def test_a_killed_job_whose_number_another_process_has_is_replaced_after_a_silence(
    tmp_path: Path,
) -> None:
    leave_lease_of_a_killed_job(tmp_path)
    rewrite(tmp_path / FILE, pid=os.getppid(), start=None)
    ours, begun = JobLease(tmp_path), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > FAST["LEASE_S"]
    ours.give_back()


@pytest.mark.parametrize("left", ["", "\0" * 200, '{"host": "of an earlier version"}'])
def test_a_lease_that_a_power_cut_has_emptied_is_replaced(left, tmp_path) -> None:
    (tmp_path / FILE).write_text(left)
    ours, begun = JobLease(tmp_path), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > FAST["LEASE_S"]
    ours.give_back()


def test_a_job_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(job_lease, "GRACE_S", 30.0)
    with another_job(tmp_path) as job:
        waiting = threading.Thread(target=lambda: (time.sleep(0.3), job.kill(), job.wait()))
        waiting.start()
        ours = JobLease(tmp_path)
        ours.take()
        waiting.join()
        ours.give_back()


def test_a_job_on_another_node_runs_while_its_file_is_touched(tmp_path: Path) -> None:
    theirs = Lease(tmp_path / FILE)
    assert theirs.take()
    rewrite(tmp_path / FILE, **FAR)
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.1):
            os.utime(tmp_path / FILE)

    beating = threading.Thread(target=touch, daemon=True)
    beating.start()
    with pytest.raises(ConfigError, match="process .* on far"):
        JobLease(tmp_path).take()
    is_over.set()
    beating.join()
    ours, begun = JobLease(tmp_path), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > FAST["LEASE_S"]
    theirs.give_back()  # it has noticed: the file stays
    before = (tmp_path / FILE).stat().st_mtime_ns
    time.sleep(3 * FAST["BEAT_S"])
    assert (tmp_path / FILE).stat().st_mtime_ns > before  # and so does ours
    ours.give_back()


RACER = f"""
import os, sys, time
from pathlib import Path
from meshwright.system import lease
vars(lease).update({FAST})
file, inside, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for number in range(rounds):
    held = lease.Lease(file).__enter__()
    os.mkdir(inside)  # fails if another is inside
    time.sleep(0.002)
    os.rmdir(inside)
    if number + 1 == rounds and sys.argv[4] == "killed":
        os.kill(os.getpid(), 9)  # the others replace it
    held.give_back()
"""


def test_six_racing_processes_are_never_inside_together(tmp_path: Path) -> None:
    """They race for the lease of a killed process, and two of them are killed while they have it:
    those they leave behind are replaced, too."""
    leave_lease_of_a_killed_job(folder := tmp_path / "folder")
    words = [sys.executable, "-c", RACER, str(folder / FILE), str(tmp_path / "inside"), "8"]
    racers = [
        subprocess.Popen(
            [*words, "killed" if number < 2 else "ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        ends = [racer.communicate(timeout=120)[1] for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    codes = [racer.returncode for racer in racers]
    assert codes == [-signal.SIGKILL] * 2 + [0] * 4, "".join(ends)


def test_what_is_not_a_jobs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("a user's")
    with pytest.raises(FileExistsError, match="no job wrote it"):
        JobLease(tmp_path).take()
    assert (tmp_path / FILE).read_text() == "a user's"
    (folder := tmp_path / "other" / FILE).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):  # as a file that this user may not read
        JobLease(folder.parent).take()
    publish(tmp_path, 5)  # and keeps nothing from being saved
    for content in ("[]", "filelock/2\npid=1\n"):
        (tmp_path / FILE).write_text(content)
        assert holder(tmp_path) == "unknown"


def test_a_job_that_was_replaced_publishes_nothing(tmp_path: Path) -> None:
    ours = JobLease(tmp_path)
    ours.take()
    publish(tmp_path, 5, nonce=f"{ours.nonce}0000")
    rewrite(tmp_path / FILE, **FAR, token="1" * 32)
    with pytest.raises(TakenOverError, match="process .* on far"):
        publish(tmp_path, 10, nonce=f"{ours.nonce}0001")
    assert listing.saved_steps(tmp_path) == [5]
    ours.give_back()
    assert (tmp_path / FILE).exists()  # it is the other's


def test_a_full_disk_leaves_no_half_of_a_file_and_stops_no_save(tmp_path: Path) -> None:
    leave_lease_of_a_killed_job(tmp_path)
    publish(tmp_path, 5)  # though the file is of another job: it is gone
    full = patch("filelock._soft.write_all", side_effect=OSError(errno.ENOSPC, "No space left"))
    marker = patch("filelock._marker.write_all", side_effect=OSError(errno.ENOSPC, "No space left"))
    with full, marker, pytest.raises(OSError, match="No space left"):
        JobLease(tmp_path).take()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.txt", "step-5"]
