"""The exit code of a job, as a table."""

import signal

import pytest

from meshwright.system.errors import LOST_PEER, RankEnd, cause, exit_code

KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "asked", "has_trained", "want"),
    [
        # asked, and saved
        ([75, 75], "SIGTERM", True, 75),
        ([75, 75], "SIGINT", True, 75),
        ([75, 75], "", True, 75),  # by a signal to one rank, a file, the clock
        # asked, with nothing new to save
        ([75, TERMINATED], "SIGHUP", False, 75),
        ([130, 143], "SIGINT", False, 130),
        ([TERMINATED], "SIGTERM", False, 75),  # a rank that is starting gets Slurm's, too
        ([-signal.SIGUSR1, 143], "SIGUSR1", False, 75),
        ([1, 1], "SIGUSR1", False, 75),  # compilers that got it, too; a rank that lost another
        ([75, 1, KILLED], "", False, 75),  # a signal to the first of them
        ([130, 1, KILLED], "", False, 130),
        # asked, and failed before it had saved
        ([1, 143], "SIGTERM", True, 1),
        ([KILLED, 1], "SIGTERM", True, 137),
        ([4, 4], "SIGTERM", True, 4),
        ([3, 3], "SIGTERM", True, 3),  # it would not resume
        ([2, 143], "SIGTERM", False, 2),
        # not asked
        ([1, TERMINATED], "", True, 1),
        ([1, KILLED], "", True, 137),  # the other lost its connection
        ([2, 1], "", False, 2),
        ([143, 143], "", False, 143),
        ([-signal.SIGQUIT, 143], "", True, 131),
    ],
)
def test_the_exit_code_of_a_job(codes, asked, has_trained, want) -> None:
    ends = [RankEnd(rank, code) for rank, code in enumerate(codes)]
    assert exit_code(ends, asked, has_trained=has_trained) == want
    assert exit_code(ends[::-1], asked, has_trained=has_trained) == want


def test_a_rank_that_lost_another_is_not_the_cause() -> None:
    victim, culprit = RankEnd(0, 1, 1.0, has_lost_peer=True), RankEnd(1, 1, 2.0)
    assert cause([victim, culprit]) == culprit
    assert cause([victim, RankEnd(2, 1, 3.0, has_lost_peer=True)]) == victim


@pytest.mark.parametrize(
    "words",
    [
        "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1",
        "[/gloo/transport/tcp/pair.cc:535] Read error [::1]:1: Connection reset by peer",
        "[/gloo/transport/tcp/pair.cc:477] Write error [::1]:1: Broken pipe",
    ],
)
def test_words_of_a_lost_connection(words) -> None:
    assert LOST_PEER.search(f"Traceback\nRuntimeError: {words}")
