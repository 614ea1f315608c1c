"""What the launcher does about signals, and whom it blames."""

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from meshwright import history
from meshwright.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.torchrun import PREFIX, _ask_to_stop, _report, _set_up_console
from meshwright.launch.watch import Watch
from meshwright.log import TERMINAL, console_stream, log_to_console, logger


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
    watch = Watch(tmp_path, lambda rank: None, lambda: tmp_path, print)
    with pytest.raises(SystemExit, match="1"):
        _report(ChildFailedError("job", failures), is_asked=False, args=Namespace(), watch=watch)
    assert capsys.readouterr().err == "callstack of 1\nmeshwright: rank 1 failed (exit 1)\n"


@pytest.mark.parametrize("first_rank", [0, 2])
def test_the_launcher_of_the_first_rank_notes_the_end_of_ranks_that_were_killed(
    tmp_path, capsys, first_rank: int
) -> None:
    hearts = [Heartbeat(tmp_path, {"rank": first_rank + rank}) for rank in (0, 1)]
    for heart in hearts:
        heart.beat("data", 7)
    watch = Watch(tmp_path, lambda rank: None, lambda: tmp_path, print)
    history.note(tmp_path, 5, "start", {})
    failed = first_rank + 1
    killed = {failed: ProcessFailure(failed, 7, -signal.SIGKILL, "")}
    words = ["--job.dump_folder", str(tmp_path)]
    given = Namespace(training_script_args=words, log_dir=str(tmp_path), local_ranks_filter="0")
    with pytest.raises(SystemExit, match="137"):
        _report(ChildFailedError("job", killed), is_asked=False, args=given, watch=watch)
    how = f"rank {failed} was killed by SIGKILL, in data of step 7"
    assert capsys.readouterr().err == f"meshwright: {how}\n"
    _, *ends = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    notes = [(end["event"], end["step"], end["reason"]) for end in ends]
    assert notes == ([("end", 7, f"failed: {how}")] if first_rank == 0 else [])


def test_the_rank_that_is_shown_writes_to_the_launcher_s_terminal(monkeypatch) -> None:
    """With colour and bars, which torchrun would not pass on; the other ranks do not."""
    seen, terminal = os.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w"))
    for name in (TERMINAL, PREFIX, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # and put back afterwards
    several = Namespace(local_ranks_filter="0,1", role="rank")
    _set_up_console(several)
    assert (os.environ[TERMINAL], several.role) == ("", "rank")
    one = Namespace(local_ranks_filter="1", role="rank")
    _set_up_console(one)
    assert (os.environ[TERMINAL], one.role) == (f"1:{os.ttyname(terminal)}", "")
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        log_to_console()
        assert (console_stream() is sys.stdout) == (rank == "0")
    logger.info("from rank 1")
    assert os.read(seen, 100).endswith(b" from rank 1\r\n")
