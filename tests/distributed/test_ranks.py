"""Ranks start soon, wait without work, and are missed if they die."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.commands.prove.ranks import RankError, RankPool


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch gives gloo's threads no names")
@pytest.mark.ranks(2)
def test_all_groups_of_a_rank_share_one_gloo_thread() -> None:
    """It wakes up a hundred times a second, once there are several groups."""
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    for group in groups:
        dist.barrier(group)
        dist.destroy_process_group(group)
    assert names.count("gloo_tcp_loop") == 1


def _origin() -> tuple[int, int]:
    """The process that this one forked from, and its threads: a fork would lose all but one."""
    parent = os.getppid()
    return parent, len(list(Path(f"/proc/{parent}/task").iterdir()))


def test_ranks_fork_from_one_process_that_has_no_threads(on_ranks) -> None:
    (first, threads), other = on_ranks(2, _origin)
    assert other == (first, threads)
    assert first != os.getpid()
    assert threads == 1


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(60)


def test_a_rank_that_dies_is_missed_at_once() -> None:
    with pytest.raises(RankError, match="rank 1: its process ended"):
        RankPool(2).run(_die)


def test_a_rank_that_is_aborted_says_where() -> None:
    """As C++ does that finds its memory damaged."""
    with pytest.raises(RankError, match=r"exit code -6\)\nFatal .*Aborted(.|\n)*in _serve"):
        RankPool(1).run(os.abort)


def test_a_rank_that_dies_before_it_reads_is_missed_too() -> None:
    """Its end of the pipe still holds the function: the system then says reset, not the end."""
    pool = RankPool(1)
    pid = pool.run(os.getpid)[0]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RankError, match="rank 0: its process ended"):
        pool.run(os.getpid)
