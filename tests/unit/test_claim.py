"""One job at a time writes to a folder of checkpoints."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from meshwright.checkpoint import claim, commit
from meshwright.checkpoint.claim import FILE, Claim, TakenOverError, holder, new_nonce
from meshwright.system import claims
from meshwright.system.errors import ConfigError
from tests.helpers.checkpoints import publish

OTHER = """
import sys, time
from pathlib import Path
from meshwright.checkpoint.claim import Claim
from meshwright.system import claims
claims.BEAT_S = 0.1
Claim(Path(sys.argv[1]), sys.argv[2]).take()
print("taken", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch) -> None:
    for module, times in (
        (claims, {"BEAT_S": 0.1, "SILENCE_S": 0.6}),
        (claim, {"GRACE_S": 0.3, "POLL_S": 0.02}),
    ):
        for name, seconds in times.items():
            monkeypatch.setattr(module, name, seconds)


@contextmanager
def another_job(folder: Path) -> Iterator[subprocess.Popen]:
    words = [sys.executable, "-c", OTHER, str(folder), new_nonce()]
    environment = os.environ | {"SLURM_JOB_ID": "77"}
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert job.stdout.readline() == "taken\n"
        yield job
    finally:
        job.kill()
        job.wait()


def leave_claim_of_a_killed_job(folder: Path) -> None:
    with another_job(folder) as job:
        job.kill()
        job.wait()


def test_a_job_that_runs_is_named_and_one_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with another_job(tmp_path) as job:
        with pytest.raises(ConfigError) as error:
            Claim(tmp_path, new_nonce()).take()
        assert error.value.key == "job.dump_folder"
        said = f"process {job.pid} on {os.uname().nodename} (job 77)"
        assert said in str(error.value)
        assert f"remove {tmp_path / FILE}" in str(error.value)
        job.send_signal(signal.SIGKILL)
        while not holder(tmp_path).is_gone:  # not even its parent has noticed
            time.sleep(0.01)
        ours = Claim(tmp_path, new_nonce())
        begun = time.monotonic()
        ours.take()
        assert time.monotonic() - begun < claims.SILENCE_S
        assert holder(tmp_path).pid == os.getpid()
        ours.give_back()
    assert not tmp_path.exists()  # it was empty again


def test_a_killed_job_whose_number_another_process_has_is_replaced_after_a_silence(
    tmp_path: Path,
) -> None:
    leave_claim_of_a_killed_job(tmp_path)
    rewrite(tmp_path, pid=os.getppid())
    ours, begun = Claim(tmp_path, new_nonce()), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > claims.SILENCE_S
    ours.give_back()


@pytest.mark.parametrize("left", ["", "\0" * 200])
def test_a_claim_that_a_power_cut_has_emptied_is_replaced_after_a_silence(left, tmp_path) -> None:
    (tmp_path / FILE).write_text(left)
    ours, begun = Claim(tmp_path, new_nonce()), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > claims.SILENCE_S
    ours.give_back()


def test_a_job_that_is_about_to_end_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claim, "GRACE_S", 30.0)
    with another_job(tmp_path) as job:
        threading.Timer(0.3, job.kill).start()
        ours = Claim(tmp_path, new_nonce())
        ours.take()
        ours.give_back()


def rewrite(folder: Path, **values: object) -> None:
    """Change who holds the folder, as another job does that takes it."""
    content = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(content | values))


# a machine that cannot be seen from here, and no number of ours
FAR = {"machine": "another boot", "host": "far", "pid": 2**30}


def test_a_job_on_another_machine_runs_while_its_file_is_touched(tmp_path: Path) -> None:
    claims.Claim(tmp_path / FILE)._create()
    rewrite(tmp_path, **FAR)
    is_over = threading.Event()

    def touch() -> None:
        while not is_over.wait(0.1):
            os.utime(tmp_path / FILE)

    beating = threading.Thread(target=touch, daemon=True)
    beating.start()
    with pytest.raises(ConfigError, match="process .* on far"):
        Claim(tmp_path, new_nonce()).take()
    is_over.set()
    beating.join()
    ours, begun = Claim(tmp_path, new_nonce()), time.monotonic()
    ours.take()
    assert time.monotonic() - begun > claims.SILENCE_S
    before = (tmp_path / FILE).stat().st_mtime_ns
    time.sleep(3 * claims.BEAT_S)
    assert (tmp_path / FILE).stat().st_mtime_ns > before  # and so does ours
    ours.give_back()


def test_of_two_that_replace_the_same_one_job_remains(tmp_path: Path) -> None:
    leave_claim_of_a_killed_job(tmp_path)
    ours = [claims.Claim(tmp_path / FILE) for _ in range(4)]
    assert len({one.owner.nonce for one in ours}) == 4
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(claims.Claim.take, ours))
    (winner,) = [one for one, is_taken in zip(ours, taken, strict=True) if is_taken]
    assert holder(tmp_path) == winner.owner
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    winner.give_back()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_claim_that_is_new_by_the_time_it_is_moved_is_put_back(
    tmp_path, monkeypatch, has_links
) -> None:
    if not has_links:
        monkeypatch.setattr("os.link", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no links")))
    theirs = claims.Claim(tmp_path / FILE)
    assert theirs.take()
    dead = claims.State(replace(theirs.owner, pid=2**30), 0)
    seen, real = iter([dead]), claims.read
    monkeypatch.setattr(claims, "read", lambda file: next(seen, None) or real(file))
    assert not claims.Claim(tmp_path / FILE).take()
    assert holder(tmp_path) == theirs.owner
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    theirs.give_back()


def test_what_is_not_a_jobs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("a user's")
    with pytest.raises(FileExistsError, match="no job wrote it"):
        Claim(tmp_path, new_nonce()).take()
    assert (tmp_path / FILE).read_text() == "a user's"
    (folder := tmp_path / "other" / FILE).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):  # as a file that this user may not read
        Claim(folder.parent, new_nonce()).take()
    publish(tmp_path, 5)  # and keeps nothing from being saved
    for content in ("[]", '{"host": "a"}'):
        (tmp_path / FILE).write_text(content)
        assert holder(tmp_path) is None


def test_a_job_that_was_replaced_publishes_nothing(tmp_path: Path) -> None:
    ours = Claim(tmp_path, "0" * 12)
    ours.take()
    publish(tmp_path, 5)  # its nonce begins with that of the claim
    rewrite(tmp_path, **FAR, nonce="1" * 12)
    with pytest.raises(TakenOverError, match="process .* on far"):
        publish(tmp_path, 10)
    assert commit.saved_steps(tmp_path) == [5]
    ours.give_back()
    assert (tmp_path / FILE).exists()  # it is the other's


def test_a_full_disk_leaves_no_half_of_a_file_and_stops_no_save(tmp_path: Path) -> None:
    leave_claim_of_a_killed_job(tmp_path)
    publish(tmp_path, 5)  # though the file is of another job: it is gone
    full = patch.object(claims, "asdict", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space left"):
        Claim(tmp_path, new_nonce()).take()
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
