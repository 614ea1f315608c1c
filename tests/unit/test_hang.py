"""Who is blamed for a hang, by the launcher's thread that watches; ranks are plain processes."""

import concurrent.futures.thread
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from meshwright.launch import heartbeat, node_files, watch
from meshwright.launch.heartbeat import Beat, Heartbeat, read_beats
from meshwright.launch.node_files import NodeFiles
from meshwright.launch.watch import ABORTED, Evidence, Watch, culprits, verdict, waits_for_others
from meshwright.system.errors import SaveError
from meshwright.system.files import state_of
from meshwright.train.stop import StopAgreement

LIMIT_S = 0.5
RANK = """
import json, os, sys, time
from pathlib import Path
from meshwright.launch.heartbeat import Heartbeat

def dead_loop():
    while True:
        pass

folder, facts, way = sys.argv[1:]
heart = Heartbeat(Path(folder), json.loads(facts))
heart.limit(%s, "comm.train_timeout_seconds")
heart.answer(lambda: "last collectives: gloo:all_reduce")
heart.update("data", 7)
if way != "behind":
    heart.update("forward/backward")
print("ready", flush=True)
if way == "loop":
    dead_loop()
if way == "abort":
    time.sleep(float(%s))
    os.abort()
with heart.guard():
    if way == "timeout":
        time.sleep(float(%s))
        raise RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")
    time.sleep(60)
""" % ((LIMIT_S,) * 3)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    # ranks look for the question every half second
    times = {"LOOK_EVERY_S": 0.1, "ANSWER_S": 0.8, "WARN_AFTER_S": 0.5}
    for name, seconds in times.items():
        monkeypatch.setattr(watch, name, seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """`start(rank, way, folder, **facts)`: a rank that waits, loops, aborts or times out."""
    with ExitStack() as stack:

        def begin(rank: int, way: str, folder: Path = tmp_path, **facts: object):
            facts = {"rank": rank, "local_rank": rank, "machine": 0, "machines": 1} | facts
            words = [sys.executable, "-c", RANK, folder, json.dumps({"world_size": 2} | facts), way]
            process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout.readline() == b"ready\n"
            return process

        yield begin


def watching(folder: Path, **given: object) -> Watch:
    """A launcher that has no rank's stderr."""
    options = {"stderr": lambda rank: None, "reports": lambda: folder, "leave": Mock()}
    return Watch(folder, *(options | given).values())


def judge(folder: Path, stderr: Path | None = None, wait_s: float = 8.0) -> tuple[str, float]:
    """Watch until there is a verdict; return it and the seconds it took."""
    begun = time.monotonic()
    with watching(folder, stderr=lambda rank: stderr) as launcher:
        while launcher.verdict is None and time.monotonic() - begun < wait_s:
            time.sleep(0.05)
    return "\n".join(launcher.verdict or []), time.monotonic() - begun


def test_a_stopped_rank_is_named_with_the_stacks_of_all(tmp_path: Path, start) -> None:
    ranks = [start(0, "wait"), start(1, "wait")]
    os.kill(ranks[1].pid, signal.SIGSTOP)
    text, seconds = judge(tmp_path)
    *_, limit, last = text.splitlines()
    host = os.uname().nodename
    assert last.startswith(f"rank 1 (on {host}) hangs in forward/backward of step 7, entered ")
    assert last.endswith(" s ago: stopped by a signal (SIGSTOP)")
    assert limit == "the limit on waiting: comm.train_timeout_seconds = 0.5 s"
    assert "rank 0: in forward/backward of step 7\n" in text
    assert seconds < LIMIT_S + 5
    assert [rank.wait(5) for rank in ranks] == [-signal.SIGKILL] * 2
    report = (tmp_path / "hang_0.txt").read_text()
    assert 'File "<string>", line' in report
    assert "last collectives: gloo:all_reduce" in report


def test_a_rank_in_a_loop_is_named_when_a_collective_of_another_times_out(tmp_path, start) -> None:
    """Both are in the same phase; the one that has not failed is no victim."""
    victim = start(0, "timeout")
    start(1, "loop")
    text, _ = judge(tmp_path)
    assert victim.wait(5) == -signal.SIGKILL  # it did not leave before, as the first to fail
    assert "rank 1 (on " in text.splitlines()[-1]
    assert text.endswith("computing")
    assert "dead_loop" in (tmp_path / "hang_0.txt").read_text()


def test_a_folder_that_does_not_answer_delays_the_verdict_for_seconds(tmp_path, start, monkeypatch):
    monkeypatch.setattr(watch, "WRITE_S", 0.2)
    rank = start(0, "wait")
    start(1, "wait")
    os.kill(rank.pid, signal.SIGSTOP)
    begun = []
    reports = lambda: begun.append(time.monotonic()) or time.sleep(30) or tmp_path  # noqa: E731
    with watching(tmp_path, reports=reports) as launcher:
        assert rank.wait(20) == -signal.SIGKILL
    assert time.monotonic() - begun[0] < 2.8
    assert launcher.verdict[-1].startswith("rank 0 (on ")
    assert not any("stacks of all ranks" in line for line in launcher.verdict)


def test_an_early_error_is_no_hang(tmp_path: Path) -> None:
    """Though its text is that of a timeout; and an error of the config, or one that all ranks
    report themselves, as of a file system, is none at all."""
    heart = Heartbeat(tmp_path, {"rank": 0})
    begun = time.monotonic()
    for error, limit_s in (
        (RuntimeError("timed out"), 100),
        (ValueError("timed out"), 0),
        (SaveError("[Errno 110] Connection timed out"), 0),
    ):
        heart.limit(limit_s, "comm.train_timeout_seconds")
        with pytest.raises(type(error)), heart.guard():
            raise error
    assert time.monotonic() - begun < 1
    assert read_beats(tmp_path)[0].failed == ""


@pytest.mark.parametrize("said", [ABORTED, "out of memory"])
def test_a_rank_that_nccl_aborts_at_the_limit_is_no_cause(tmp_path: Path, start, said: str) -> None:
    start(0, "abort").wait()
    start(1, "loop")
    (tmp_path / "stderr.log").write_text(f"[rank0]: {said}: WorkNCCL(SeqNum=7)\n")
    text, _ = judge(tmp_path, tmp_path / "stderr.log", wait_s=8.0 if said == ABORTED else 0.5)
    assert ("rank 1 (on " in text) == (said == ABORTED)


@pytest.mark.parametrize(("way", "count"), [("loop", 0), ("behind", 1)])
def test_a_job_that_may_go_on_is_not_ended(tmp_path, start, caplog, way: str, count: int) -> None:
    """A rank that keeps the others waiting is named, once. Not if all may be at work."""
    ranks = [start(0, "wait"), start(1, way)]
    with watching(tmp_path) as launcher:
        time.sleep(LIMIT_S + watch.WARN_AFTER_S + 2 * watch.ANSWER_S + 0.5)
    assert launcher.verdict is None
    assert [rank.poll() for rank in ranks] == [None, None]
    assert len(caplog.messages) == count
    assert all("rank 1 has been in data of step 7 for" in text for text in caplog.messages)


def test_nodes_tell_each_other(tmp_path: Path, start, monkeypatch) -> None:
    """The rank that is stopped is on another node than the one that waits; without a shared folder
    each judges its own."""
    monkeypatch.setattr(node_files, "TELL_S", 4.0)
    for shared in (True, False):
        folders = [tmp_path / f"{shared}_{name}" for name in "ab"]
        logs = [tmp_path, tmp_path] if shared else folders
        ranks = [
            start(number, "wait", folder, machine=number, machines=2, local_rank=0)
            for number, folder in enumerate(folders)
        ]
        if not shared:
            os.kill(ranks[0].pid, signal.SIGSTOP)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        with ExitStack() as stack:
            launchers = [
                stack.enter_context(watching(folder, reports=lambda log=log: log))
                for folder, log in zip(folders, logs, strict=True)
            ]
            end = time.monotonic() + 15
            while time.monotonic() < end and any(w.verdict is None for w in launchers):
                time.sleep(0.1)
        lasts = [launcher.verdict[-1].partition(" (on ")[0] for launcher in launchers]
        assert lasts == (["rank 1", "rank 1"] if shared else ["rank 0", "rank 1"])
        told = ["only the ranks of this node" in "".join(w.verdict) for w in launchers]
        assert told == [not shared] * 2
        assert [(f / f"hang_{n}.txt").exists() for n, f in enumerate(logs)] == [True, True]


BEAT = Beat(0, 1, 5, 3, "save", 1e9, LIMIT_S, "comm.k", "", {"machines": 1})
ONE = Evidence(**vars(BEAT), host="a", age_s=9.0, state="S", stacks="", waits=True, collectives="")
SAME = [replace(ONE, rank=rank) for rank in range(4)]


def node(folder: Path, number: int, nodes: int = 2) -> NodeFiles:
    """A node whose thread has ended, so that a test says when it looks."""
    files = NodeFiles(lambda: folder, number, nodes)
    files._ended.set()
    files._thread.join()
    files.look()
    return files


def test_only_what_another_node_writes_in_this_run_is_a_hang(tmp_path, monkeypatch) -> None:
    """Files of an earlier run are there; the others hear of a hang from the first node."""
    monkeypatch.setattr(node_files, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(node_files, "TELL_S", 0.3)
    for number in range(3):
        (tmp_path / f"node_{number}.json").write_text('["old"]')
    first, last = node(tmp_path, 0, 3), node(tmp_path, 2, 3)
    for files in (first, last):
        files.look()
        assert not files.is_hang_found
    assert last.exchange(["c"]) == ["c"]  # others have written nothing, and node 1 nothing new
    for number, files in ((0, first), (1, node(tmp_path, 1, 3))):
        files.look()
        assert files.is_hang_found == (number == 0)
    assert first.exchange(["a"]) == ["a", "c"]
    last.look()
    assert last.is_hang_found
    launcher, beat = watching(tmp_path), replace(BEAT, facts={"machines": 3, "machine": 2})
    launcher._nodes = last
    assert launcher._is_hung([beat])
    first.leave()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["node_1.json", "node_2.json"]


def test_a_folder_that_does_not_answer_keeps_no_launcher(tmp_path, start, monkeypatch) -> None:
    """The node that has the store lost its power, so torchrun waits for many minutes as well."""
    for name in ("STUCK_S", "WRITE_S", "TELL_S"):
        monkeypatch.setattr(watch, name, 0.1)
    rank, left = start(0, "timeout", machines=2), threading.Event()
    with watching(tmp_path, reports=lambda: left.wait(60) and tmp_path, leave=left.set) as launcher:
        assert left.wait(20)
    assert rank.wait(5) == -signal.SIGKILL
    assert "only the ranks of this node" in "".join(launcher.verdict)


def test_a_node_that_tells_nothing_more_is_lost(tmp_path: Path, monkeypatch) -> None:
    """It has lost its power while the others save, which may take an hour."""
    first = node(tmp_path, 0)
    first.look()
    silent = [first.silent_s]  # the other has no ranks yet
    other = node(tmp_path, 1)
    for files in (first, first, first, other, first):
        time.sleep(0.01)  # times of files may be coarse
        files.look()
        silent.append(files.silent_s)
    assert silent == [0, 0, 2, 4, 0, 0]
    for _ in range(3):
        other.look()
    assert other.silent_s == 4  # the first node is looked at, too
    other._ended.set()
    other.leave()  # that a launcher has ended is not a loss
    first.look()
    assert first.silent_s == 0
    monkeypatch.setattr(watch, "SILENT_S", 0.1)
    beat = replace(BEAT, facts={"machines": 2, "machine": 0})
    for silent_s, limit_s, is_hung in ((0.15, 0.15, False), (0.16, 0.15, True), (99, 0, False)):
        launcher = watching(tmp_path)
        launcher._nodes = Mock(is_hang_found=False, silent_s=silent_s)
        assert launcher._is_hung([replace(beat, limit_s=limit_s)]) == is_hung


@pytest.mark.parametrize(
    ("change", "others"),
    [
        ({"state": "T"}, {}),
        ({"count": 4}, {"state": "D"}),
        ({"waits": False}, {"state": "D"}),
        ({"waits": False}, {"failed": "Timed out"}),
        ({"state": "D"}, {}),
        ({"state": "T"}, {"count": 4, "waits": False}),
    ],
)
def test_the_rank_that_differs_is_the_cause(change: dict, others: dict) -> None:
    ranks = [replace(rank, **(change if rank.rank == 2 else others)) for rank in SAME]
    assert [rank.rank for rank in culprits(ranks)] == [2]
    assert verdict(ranks, 4, "there")[-1].startswith("rank 2 (on a) hangs in save of step 3")


@pytest.mark.parametrize(
    ("file", "torch", "waits"),
    [
        ("/a/concurrent/futures/meshwright/meshwright/step.py", watch.TORCH, False),
        ("/größe der welt/meshwright/meshwright/train/stop.py", watch.TORCH, True),
        (
            inspect.getsourcefile(StopAgreement),
            watch.TORCH,
            True,
        ),  # or who waits there would seem the cause
        (watch.__file__, watch.TORCH, False),
        (concurrent.futures.thread.__file__, watch.TORCH, True),
        (dist.distributed_c10d.__file__, watch.TORCH, True),
        ("/home/me/torch/distributed/train.py", watch.TORCH, False),
        ("/src/torch/distributed/a.py", "/src/torch", True),  # it may be built from source
        ("/src/torch/distributed/a.py", "/src", False),
    ],
)
def test_folders_above_a_package_do_not_count(file, torch, waits: bool, monkeypatch) -> None:
    monkeypatch.setattr(watch, "TORCH", torch)
    stacks = f'Thread 0x1 (most recent call first):\n  File "{file}", line 1 in function\n'
    assert waits_for_others(stacks) == waits


WAITS = f"""Thread 0x0000000000000001 (most recent call first):
  File "/python/threading.py", line 3 in wait
Thread 0x0000000000000002 (most recent call first):
  File "{dist.distributed_c10d.__file__}", line 1 in all_reduce
  File "/meshwright/step.py", line 1 in train_step
"""
WORKS = WAITS.replace(dist.distributed_c10d.__file__, "/meshwright/a.py")


def test_the_main_thread_is_the_last_and_without_stacks_nothing_is_known() -> None:
    assert [waits_for_others(stacks) for stacks in (WAITS, WORKS, "")] == [True, False, True]


def test_without_a_difference_nobody_is_blamed() -> None:
    assert verdict(SAME, 4, "")[-1] == (
        "ranks hang, and none is behind the others or does anything but wait"
    )
    assert verdict(SAME[:2], 4, "")[-1] == "the job hangs, and nothing is heard of ranks 2-3"
    stopped = [SAME[0], replace(SAME[1], state="T")]
    assert verdict(stopped, 4, "")[-1].startswith("rank 1 (on a) hangs")
    assert verdict(stopped[1:], 4, "")[-1].startswith("rank 1 (on a) hangs")
    assert culprits(SAME[:1]) == []  # the only one heard of, and it waits


def test_a_rank_that_was_stopped_twice_for_a_while_may_go_on(tmp_path, monkeypatch) -> None:
    """The limit is five looks."""
    launcher, states = watching(tmp_path), "TTTTSTTTTT"
    monkeypatch.setattr(watch, "state_of", lambda pid: states[len(found)])
    found: list[bool] = []
    while len(found) < len(states):
        found.append(launcher._is_hung([replace(BEAT, since=time.monotonic())]))
    assert found == [False] * 9 + [True]


def test_what_the_question_does_to_a_rank_is_not_its_state(tmp_path: Path) -> None:
    """One that is at its end, without a handler any more, dies of the signal."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        while state_of(rank.pid) != "S":
            time.sleep(0.01)
        Heartbeat(tmp_path, {"rank": 0, "pid": rank.pid})
        (evidence,) = watching(tmp_path)._examine(read_beats(tmp_path))
    assert (rank.returncode, evidence.state) == (-heartbeat.STACKS_SIGNAL, "S")


def test_a_beat_is_cheap(tmp_path: Path) -> None:
    """A step has about nine: of 10 ms, a thousandth is 10 us."""
    heart, rounds = Heartbeat(tmp_path, {"rank": 0}), 10_000
    start = time.process_time()
    for step in range(rounds):
        heart.update("forward/backward", step)
    assert (time.process_time() - start) / rounds < 20e-6
    (beat,) = read_beats(tmp_path)
    assert (beat.count, beat.step, beat.phase) == (rounds, rounds - 1, "forward/backward")
    assert state_of(beat.pid) == "R"


def test_a_phase_is_told_whole_and_beats_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    phase = "meeting the other ranks, opening the data"
    for rank in (10, 0, 2):
        (heart := Heartbeat(tmp_path, {"rank": rank})).update(phase)
    found = [(beat.rank, beat.phase) for beat in read_beats(tmp_path)]
    assert found == [(0, phase), (2, phase), (10, phase)]
    with pytest.raises(AssertionError):  # it would be cut off in every message
        heart.update("x" * 65)


def test_a_rank_alone_or_without_our_launcher_has_nobody_to_tell(tmp_path, monkeypatch) -> None:
    for folder, ranks in (("", "2"), (str(tmp_path), "1")):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        heartbeat.heartbeat_of_this_rank(folder).update("data", 1)
    assert read_beats(tmp_path) == []
