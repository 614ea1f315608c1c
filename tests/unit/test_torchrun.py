"""What the launcher does about signals, and whom it blames."""

import json
import os
import signal
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from meshwright.commands.train import _rendezvous_alone
from meshwright.launch import __main__ as launcher
from meshwright.launch import meeting as meeting_module
from meshwright.launch import torchrun
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.meeting import Meeting
from meshwright.launch.torchrun import PREFIX, _ask_to_stop, _report, _set_up_console
from meshwright.launch.watch import Watch
from meshwright.metrics.sinks import note_event
from meshwright.system.errors import EXIT_CONFIG, EXIT_HANG, EXIT_INTERRUPTED, EXIT_STOPPED
from meshwright.system.log import console_stream, log_to_console, logger, print_error
from meshwright.system.machine import place_alone
from meshwright.system.processes import TRAINED
from tests.helpers.forked import Forked
from tests.helpers.jobs import ROOT, environment, wait_for


def test_ranks_are_asked_to_stop_if_there_are_any(tmp_path: Path, capfd) -> None:
    """Otherwise the launcher waits for other machines, and no one would hear of it."""
    request, heard = tmp_path / "stop", []
    torchrun._write_requests(request)
    with pytest.raises(SystemExit, match=str(EXIT_STOPPED)):
        _ask_to_stop(request, signal.SIGTERM, heard)
    with pytest.raises(SystemExit, match=str(EXIT_STOPPED)):  # again, while torchrun ends
        _ask_to_stop(request, signal.SIGTERM, heard)
    with pytest.raises(SystemExit, match=str(EXIT_INTERRUPTED)):
        _ask_to_stop(request, signal.SIGINT, [])
    assert capfd.readouterr().err.count("stopped before the first step") == 2
    (tmp_path / "logs_of_ranks").mkdir()
    _ask_to_stop(request, signal.SIGUSR1, heard)
    assert request.read_text() == "SIGUSR1"
    said = "meshwright: SIGUSR1: the job stops, at the latest after its first step\n"
    assert capfd.readouterr().err == said
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        _ask_to_stop(request, number, heard)  # no one is in a hurry
    with pytest.raises(SignalException, match="SIGINT"):
        _ask_to_stop(request, signal.SIGINT, heard)


def test_nobody_need_read_that_a_job_is_asked_to_stop(tmp_path: Path) -> None:
    """`| tee` gets the same Ctrl-C, and ends at once."""
    (tmp_path / "logs_of_ranks").mkdir()
    (tmp_path / TRAINED).touch()
    torchrun._write_requests(tmp_path / "stop")
    read_end, write_end = os.pipe()
    os.close(read_end)
    before = os.dup(2)
    os.dup2(write_end, 2)
    try:
        _ask_to_stop(tmp_path / "stop", signal.SIGINT, [])
        print_error("nor this")
    finally:
        os.dup2(before, 2)
    assert (tmp_path / "stop").read_text() == "SIGINT"


def test_a_launcher_that_waits_says_where_and_for_whom(tmp_path, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    monkeypatch.setattr(torchrun, "SPEAK_EVERY_S", 0.2)
    left: list[object] = []  # by no machine that waits for others
    monkeypatch.setattr(torchrun, "SILENT_S", 0.1)
    monkeypatch.setattr(torchrun, "_leave", lambda *of: left.append(of))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = f"127.0.0.1:{port}"
    given = Namespace(nnodes="3", rdzv_endpoint=at, rdzv_id="job")
    torchrun._announce_wait(given, tmp_path)
    alone = f"waiting at {at}, where no node answers yet (Connection refused): "
    wait_for(lambda: alone in caplog.text, "a line", seconds=20)
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    here = socket.gethostname()
    wait_for(lambda: f"1 of 3 nodes are here ({here})" in caplog.text, "a line", seconds=20)
    (tmp_path / "logs_of_ranks").mkdir()
    assert not left
    del store


def test_a_launcher_that_starts_ranks_for_long_says_so(tmp_path, monkeypatch, caplog) -> None:
    """As one whose resolver doesn't answer: it was silent for minutes."""
    caplog.set_level("INFO", "meshwright")
    monkeypatch.setattr(torchrun, "SPEAK_EVERY_S", 0.1)
    torchrun._announce_wait(Namespace(nnodes="1"), tmp_path)
    wait_for(lambda: caplog.text.count("starting the ranks: ") > 1, "two lines", seconds=20)
    (tmp_path / "logs_of_ranks").mkdir()


ALONE = """
import ipaddress, socket
from meshwright.launch import torchrun

def numeric_only(lookup):
    def look_up(host, *args, **kwargs):
        print("looks up", host, flush=True) if not is_numeric(host) else None
        return lookup(host, *args, **kwargs)
    return look_up

def is_numeric(host):
    try:
        return host is None or bool(ipaddress.ip_address(host))
    except ValueError:
        return False

for name in ("getaddrinfo", "gethostbyaddr", "gethostbyname", "gethostbyname_ex"):
    setattr(socket, name, numeric_only(getattr(socket, name)))
torchrun.launch()
"""


def test_one_machine_asks_for_no_name(tmp_path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    place = place_alone({})
    words = [*_rendezvous_alone(place), "--local-addr", place.address, "--tee", "3"]
    rank = ["--no-python", "sh", "-c", "echo meets at $MASTER_ADDR"]
    ended = Forked([tmp_path / "alone.py", *words, *rank], environment(), cwd=ROOT).wait(60)
    assert ended.returncode == 0, ended.stderr
    assert "looks up" not in ended.stdout
    assert f"meets at {place.address}" in ended.stdout


@pytest.mark.parametrize(("given", "in_launcher"), [(None, "FATAL"), ("INFO", "INFO")])
def test_torch_prints_no_page_of_cpp_for_each_try_to_meet(monkeypatch, given, in_launcher) -> None:
    """It reads the variable once, when it is loaded. The ranks get what the user has set."""
    seen = []

    class Torchrun(ModuleType):
        def __getattr__(self, name: str) -> Callable[[], None]:
            seen.append(os.environ.get(launcher.CPP_LOG))
            return lambda: seen.append(os.environ.get(launcher.CPP_LOG))

    monkeypatch.setitem(sys.modules, "meshwright.launch.torchrun", Torchrun("torchrun"))
    for name in ("exit_when_asked", "log_to_console", "signal"):
        monkeypatch.setattr(launcher, name, Mock())
    monkeypatch.delenv(launcher.CPP_LOG, raising=False)
    if given:
        monkeypatch.setenv(launcher.CPP_LOG, given)
    launcher.main()
    assert seen[-2:] == [in_launcher, given]


def test_machines_that_lose_each_other_are_not_said_not_to_have_met(tmp_path) -> None:
    given = Namespace(nnodes="2", rdzv_endpoint="node0:1")
    error = RendezvousError("See inner exception for details.")
    error.__cause__ = RuntimeError("Connection was likely closed")
    why = "at node0:1: Connection was likely closed\n  fix: "
    said = torchrun._apart(error, given, tmp_path)
    assert said == f"the 2 nodes did not meet {why}start the same command on all"
    (tmp_path / "logs_of_ranks").mkdir()
    said = torchrun._apart(error, given, tmp_path)
    assert said == f"the nodes have lost each other {why}see the consoles of all"


STUCK = """
import signal, sys
from pathlib import Path
import torch.distributed as dist
from meshwright.launch import torchrun

heard = []
for number in (*torchrun.stop_signals(), signal.SIGQUIT):
    signal.signal(number, lambda *_: None)
torchrun.STUCK_S = 0.2
torchrun._end_though_stuck(Path(sys.argv[1]), heard)
heard += map(int, sys.argv[3:])
print("waiting", flush=True)
dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
"""


@pytest.mark.parametrize(
    ("number", "heard", "code"),
    [
        (signal.SIGTERM, [], EXIT_STOPPED),
        (signal.SIGINT, [signal.SIGINT], EXIT_INTERRUPTED),  # the main thread has said so
        (signal.SIGQUIT, [], 128 + signal.SIGQUIT),  # a scheduler does not start it again
    ],
)
def test_a_launcher_hears_a_request_while_torch_waits_for_the_first_machine(
    tmp_path, number: signal.Signals, heard: list[signal.Signals], code: int
) -> None:
    """In C++, where no handler of Python's runs, for ten minutes or for ever."""
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "console").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        words = [tmp_path / "stuck.py", tmp_path / "console", port, *map(int, heard)]
        launcher = Forked(words, environment(), cwd=ROOT)
        launcher.wait_for_line("waiting")
        peer, _ = silent.accept()
        launcher.send_signal(number)
        ended = launcher.wait(30)
        peer.close()
    assert ended.returncode == code
    said = f"meshwright: {number.name}: stopped before the first step"
    assert ended.stderr.startswith("" if heard else said)
    assert bool(ended.stderr) != bool(heard)
    assert not (tmp_path / "console").exists()


def test_a_meeting_without_an_answer_ends_no_launcher_with_ranks(tmp_path, monkeypatch) -> None:
    ranks, left = tmp_path / "logs_of_ranks", list[object]()
    meeting = SimpleNamespace(is_silent=True, come=ranks.mkdir, describe=str)
    monkeypatch.setattr(torchrun, "SILENT_S", -1)
    monkeypatch.setattr(torchrun, "_leave", lambda *of: left.append(of))
    monkeypatch.setattr(torchrun, "Meeting", lambda *_: meeting)
    given = Namespace(nnodes="2", rdzv_endpoint="node:1", rdzv_id="job")
    torchrun._announce_wait(given, tmp_path)
    wait_for(lambda: "rendezvous" not in {one.name for one in threading.enumerate()}, "its end")
    assert ranks.exists()
    assert not left


def test_a_launcher_whose_ranks_have_come_meanwhile_is_not_ended(tmp_path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "console").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [tmp_path / "stuck.py", tmp_path / "console", silent.getsockname()[1]]
        launcher = Forked(words, environment(), cwd=ROOT)
        launcher.wait_for_line("waiting")
        (tmp_path / "console" / "logs_of_ranks").mkdir()
        launcher.send_signal(signal.SIGTERM)
        launcher.process.join(2)
        launcher.send_signal(signal.SIGKILL)
        assert launcher.wait(30).returncode == -signal.SIGKILL


APART = """
import sys
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from meshwright.launch import torchrun
def run(args):
    raise RendezvousConnectionError("the store is gone")
class Watch:
    verdict = ["rank 1 hangs"] if sys.argv.pop() == "hang" else None
    __init__ = lambda *_: None
    __enter__ = __exit__ = last_beat = __init__
torchrun.run, torchrun.Watch, torchrun._announce_wait = run, Watch, lambda *_: None
torchrun.launch()
"""


@pytest.mark.parametrize(
    ("found", "says", "code"),
    [("hang", "rank 1 hangs\n", EXIT_HANG), ("nothing", "the 2 nodes did not meet at ", 1)],
)
def test_a_hang_is_told_though_the_store_is_gone(found, says, code, tmp_path) -> None:
    (tmp_path / "apart.py").write_text(APART)
    words = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:1", "--no-python", "true"]
    ended = Forked([tmp_path / "apart.py", *words, found], environment(), cwd=ROOT).wait(60)
    assert ended.stderr.startswith(f"meshwright: {says}")
    assert ended.returncode == code


def test_another_program_at_the_rendezvous_ends_the_job(tmp_path, monkeypatch, capsys) -> None:
    """torch takes whatever listens for its store, and waits for its answer for ever."""
    left: list[tuple[Path, int]] = []

    def leave(folder: Path, code: int) -> None:
        left.append((folder, code))
        raise OSError

    monkeypatch.setattr(meeting_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(torchrun, "SILENT_S", 0.5)
    monkeypatch.setattr(torchrun, "_leave", leave)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        meeting = Meeting(at, 2, "job")
        meeting.come()
        assert meeting.describe() == f"waiting at {at}: {meeting_module.OTHER_PROGRAM}"
        monkeypatch.setattr(torchrun, "Meeting", lambda *_: meeting)
        given = Namespace(nnodes="2", rdzv_endpoint=at, rdzv_id="job")
        torchrun._announce_wait(given, tmp_path)
        wait_for(lambda: left, "the end", seconds=20)
    wait_for(lambda: not meeting.is_silent, "torch's error")
    assert left == [(tmp_path, EXIT_CONFIG)]
    assert f"RDZV_ENDPOINT = '{at}': a program listens there" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_machine_that_has_left_the_meeting_is_not_counted(host, monkeypatch) -> None:
    address = host.strip("[]")
    try:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    except RuntimeError:
        pytest.skip(f"this machine has no {host}")
    at = f"{host}:{store.port}"
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    slurms = ["node1.cluster.example", "node2", "node3"]  # one of the two may write the domain
    monkeypatch.setattr("meshwright.system.slurm.node_names", lambda env: slurms)
    mine = Meeting(at, 3, "job")
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    other = Meeting(at, 3, "job")
    Meeting(at, 3, "another job").come()
    for both in (True, False):
        mine.come()
        if both:
            other.come()
        here = ("2", "node1, node2", "node3") if both else ("1", "node1", "node2, node3")
        words = "waiting at {}: {} of 3 nodes are here ({}); missing: {}"
        assert mine.describe() == words.format(at, *here)


def failure(folder: Path, rank: int, code: int, callstack: str, when: float) -> ProcessFailure:
    """As torchrun knows it from the file that the rank has written."""
    file = folder / f"{rank}.json"
    extra = {"timestamp": "1000", "py_callstack": callstack}
    file.write_text(json.dumps({"message": {"message": "it is bad", "extraInfo": extra}}))
    os.utime(file, (when, when))
    return ProcessFailure(rank, 7, code, str(file))


def report(folder: Path, failures: dict[int, ProcessFailure], **given: object) -> int:
    watch = Watch(folder, lambda rank: None, lambda: folder, Mock())
    watch.began -= 60  # ranks begin after it
    words = ["-u", "-P", "-m", "meshwright.train", "--job.dump_folder", str(folder)]
    defaults = {"local_ranks_filter": "0", "log_dir": str(folder), "training_script_args": words}
    args = Namespace(**defaults | given)
    return _report(ChildFailedError("job", failures), folder / "stop", args, watch)


def test_the_first_to_fail_is_the_cause_but_no_rank_that_lost_another(tmp_path, capsys) -> None:
    """Also of those that fail in the same second."""
    lost = "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
    of_one = failure(tmp_path, 1, 1, "callstack of 1", 1000.2)
    for callstack, when in (("callstack of 0", 1000.6), (f"Traceback\n{lost}", 1000.0)):
        last = failure(tmp_path, 2, 1, "callstack of 2", 1000.9)
        failures = {0: failure(tmp_path, 0, 1, callstack, when), 1: of_one, 2: last}
        assert report(tmp_path, failures) == 1
        assert capsys.readouterr().err == "callstack of 1\nmeshwright: rank 1 failed (exit 1)\n"
    assert report(tmp_path, {0: failures[0]}) == 1
    said = capsys.readouterr().err
    assert said.startswith("meshwright: rank 0 lost its connection to another rank; look for ")
    assert "failed" not in said
    assert "Traceback" not in said


def test_a_failure_after_a_request_is_not_called_a_stop(tmp_path, capsys) -> None:
    """Who starts a job again that exits with 75 would start it for ever."""
    (tmp_path / "stop").write_text("SIGTERM")
    (tmp_path / TRAINED).touch()
    assert report(tmp_path, {0: failure(tmp_path, 0, 1, "the save failed", 1.0)}) == 1
    assert capsys.readouterr().err.splitlines() == [
        "the save failed",
        "meshwright: rank 0 failed (exit 1)",
        "meshwright: the job was asked to stop, but failed before it saved",
    ]


def test_an_error_of_a_rank_that_is_not_shown_is_said(tmp_path, capsys) -> None:
    failures = {0: failure(tmp_path, 0, EXIT_CONFIG, "", 1.0)}
    assert report(tmp_path, failures, local_ranks_filter="1") == EXIT_CONFIG
    assert capsys.readouterr().err == "meshwright: rank 0: it is bad\n"
    assert report(tmp_path, failures, local_ranks_filter="0,1") == EXIT_CONFIG
    assert capsys.readouterr().err == ""
    failures[1] = failure(tmp_path, 1, EXIT_CONFIG, "", 0.5)  # the first, with the same words
    assert report(tmp_path, failures, local_ranks_filter="0") == EXIT_CONFIG
    assert capsys.readouterr().err == ""


def ends_of(folder: Path) -> list[tuple[str, int, str]]:
    """What the history says after the start."""
    _, *ends = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    return [(end["event"], end["step"], end["reason"]) for end in ends]


def test_a_stop_before_the_first_step_is_in_the_history(tmp_path, capsys) -> None:
    Heartbeat(tmp_path, {"rank": 0}).update("data", 0)
    note_event(tmp_path, 0, "start", {})
    (tmp_path / "stop").write_text("SIGTERM")
    assert report(tmp_path, {0: failure(tmp_path, 0, 75, "", 1.0)}) == 75
    assert ends_of(tmp_path) == [("end", 0, "stopped: SIGTERM")]


@pytest.mark.parametrize("first_rank", [0, 2])
def test_the_launcher_of_the_first_rank_notes_the_end_of_ranks_that_were_killed(
    tmp_path, capsys, first_rank: int
) -> None:
    hearts = [Heartbeat(tmp_path, {"rank": first_rank + rank}) for rank in (0, 1)]
    for heart in hearts:
        heart.update("data", 7)
    note_event(tmp_path, 5, "start", {})
    failed = first_rank + 1
    assert report(tmp_path, {failed: ProcessFailure(failed, 7, -signal.SIGKILL, "")}) == 137
    how = f"rank {failed} was killed by SIGKILL, in data of step 7"
    assert capsys.readouterr().err.startswith(f"meshwright: {how}; most often there is too little")
    assert ends_of(tmp_path) == ([("end", 7, f"failed: {how}")] if first_rank == 0 else [])


def test_the_rank_that_is_shown_writes_to_the_launcher_s_terminal(monkeypatch) -> None:
    """With colour and bars, which torchrun would not pass on; the other ranks do not."""
    seen, terminal = os.openpty()
    monkeypatch.setattr(sys, "stdout", os.fdopen(terminal, "w"))
    for name in (PREFIX, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # and put back afterwards
    several = Namespace(local_ranks_filter="0,1", role="rank")
    assert (_set_up_console(several), several.role) == ("", "rank")
    one = Namespace(local_ranks_filter="1", role="rank")
    told = _set_up_console(one)
    assert (told, one.role) == (f"1:{os.ttyname(terminal)}", "")
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        log_to_console(terminal=told)
        assert (console_stream() is sys.stdout) == (rank == "0")
    logger.info("from rank 1")
    assert os.read(seen, 100).endswith(b" from rank 1\r\n")
