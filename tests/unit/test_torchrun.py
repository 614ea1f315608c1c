"""What the launcher does about signals, and whom it blames."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from meshwright.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from meshwright.launch.torchrun import _ask_to_stop, _report


def test_ranks_are_asked_to_stop_if_there_are_any(tmp_path: Path) -> None:
    """Else it waits for other machines, and no one would hear of it."""
    request = tmp_path / "stop"
    with pytest.raises(SystemExit, match=str(EXIT_STOPPED)):
        _ask_to_stop(request, signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(EXIT_INTERRUPTED)):
        _ask_to_stop(request, signal.SIGINT)
    (tmp_path / "logs_of_ranks").mkdir()
    _ask_to_stop(request, signal.SIGUSR1)
    assert request.read_text() == "SIGUSR1"
    with pytest.raises(SignalException):
        _ask_to_stop(request, signal.SIGTERM)


def test_of_ranks_that_fail_in_the_same_second_the_first_is_the_cause(tmp_path, capsys) -> None:
    failures = {}
    for rank, when in ((0, 1000.6), (1, 1000.2), (2, 1000.9)):
        file = tmp_path / f"{rank}.json"
        extra = {"timestamp": "1000", "py_callstack": f"callstack of {rank}"}
        file.write_text(json.dumps({"message": {"message": "", "extraInfo": extra}}))
        os.utime(file, (when, when))
        failures[rank] = ProcessFailure(rank, 7, 1, str(file))
    with pytest.raises(SystemExit, match="1"):
        _report(ChildFailedError("job", failures), is_asked=False)
    assert capsys.readouterr().err == "meshwright: rank 1 failed (exit 1)\ncallstack of 1"


def running_with(word: str) -> list[str]:
    """Process numbers of those that have `word` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_a_signal_before_there_are_ranks_ends_the_preparation_too(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    command = ("meshwright.launch.door", "--prepare", "1", "train.py", "--job.config_file")
    door = subprocess.Popen([sys.executable, "-m", *command, str(config)])
    with config.open("w"):  # once the preparation reads it, which then waits
        door.terminate()
        assert door.wait(30) == EXIT_STOPPED
        until = time.monotonic() + 10
        while running_with(str(config)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not running_with(str(config))
