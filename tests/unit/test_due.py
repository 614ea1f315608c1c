"""The decisions that follow a step, how long ranks wait for each other, how a job ends that cannot
read its data, and the exit code of a job."""

import signal
from unittest.mock import MagicMock

import pytest

from meshwright.config.job_config import Checkpoint
from meshwright.config.loader import load_config
from meshwright.system.errors import (
    LOST_PEER,
    ConfigError,
    DataError,
    RankEnd,
    StorageError,
    TrainingError,
    cause,
    exit_code,
)
from meshwright.train import job
from meshwright.train.end import End, how_it_ends, raise_data_error
from meshwright.train.step_actions import actions_after
from meshwright.train.stop import _as_plain

KEYS = {
    "validation.enable": "true",
    "validation.freq": "6",
    "checkpoint.enable": "true",
    "checkpoint.interval": "4",
    "metrics.log_freq": "5",
    "training.gc_freq": "7",
}
HOST = "needs_host_figures"


def due(step: int, keys: dict[str, str] | None = None, **moment: bool) -> set[str]:
    config = load_config([f"--{key}={value}" for key, value in (KEYS | (keys or {})).items()])
    of_moment = {"is_first": False, "is_last": False, "is_asked_to_stop": False} | moment
    decided = actions_after(step, config, **of_moment)
    names = ("stop", "validate", "log", "save", "collect_garbage", "needs_host_figures")
    return {name for name in names if getattr(decided, name)}


@pytest.mark.parametrize(
    ("decided", "wanted"),
    [
        (due(3), set()),
        (due(4), {"save", HOST}),
        (due(5), {"log", HOST}),
        (due(6), {"validate", "log", HOST}),
        (due(7), {"collect_garbage"}),
        (due(3, keys={"metrics.layer_stats_freq": "3"}), {"log", HOST}),
        (due(2, keys={"metrics.layer_stats_freq": "3"}), set()),
        (due(1, is_first=True), {"log", HOST}),
        # a job that ends saves once, at its end, and validates if it is done
        (due(4, is_last=True), {"stop", "validate", "log", HOST}),
        (due(4, is_asked_to_stop=True), {"stop", "log", HOST}),
        (due(4, keys={"checkpoint.enable": "false"}), set()),
        (due(6, keys={"validation.enable": "false"}), set()),
        (due(4, keys={"checkpoint.load_only": "true"}), set()),
        (due(1, keys={"checkpoint.enable_first_step_checkpoint": "true"}), {"save", HOST}),
        (due(3, keys={"checkpoint.enable_first_step_checkpoint": "true"}), set()),
    ],
)
def test_a_step_is_followed_by_all_that_is_due(decided: set[str], wanted: set[str]) -> None:
    assert decided == wanted


@pytest.mark.parametrize(
    ("key", "limits"),
    [
        ("compile.enable", ["init_timeout_seconds"]),
        ("training.mask_documents", ["init_timeout_seconds"]),  # compiled kernels, eager or not
        ("training.deterministic", []),
    ],
)
def test_validation_that_compiles_may_take_as_long_as_the_first_step(
    monkeypatch: pytest.MonkeyPatch, key: str, limits: list[str]
) -> None:
    limits_set, running = list[str](), MagicMock(observers={})
    eager = [] if key == "compile.enable" else ["--compile.enable=false"]
    running.resolved.config = load_config([*eager, f"--{key}=true"])
    running.validate.return_value = {"loss/validation": 1.0}
    monkeypatch.setattr(job.Steps, "_set_limit", lambda _, key: limits_set.append(key))
    steps = job.Steps(running, MagicMock(), MagicMock())
    assert "loss/validation" in steps._validate()
    assert limits_set == limits


@pytest.mark.parametrize(
    ("moment", "wanted"),
    [
        ({"is_complete": False}, End.STOPPED),
        ({"is_complete": True}, End.DONE),
        ({"is_complete": True, "reason": "SIGTERM"}, End.DONE),  # there was nothing left to do
        ({"is_complete": True, "step": 7}, End.DATA),
        ({"is_complete": True, "follows": True}, End.STAGE),
        ({"is_complete": True, "follows": True, "step": 7}, End.STAGE),
        ({"is_complete": True, "follows": True, "reason": "SIGTERM"}, End.STOPPED),
    ],
)
def test_how_the_steps_of_a_stage_end(moment, wanted) -> None:
    plan = MagicMock(next_stage=MagicMock() if moment.get("follows") else None)
    plan.config.training.steps = 8
    step, reason = moment.get("step", 8), moment.get("reason", "")
    assert how_it_ends(plan, step, reason, is_complete=moment["is_complete"]) is wanted


GONE = StorageError("the hub does not answer\n  fix: again")
BAD = ConfigError("training.dataset_path", "not JSON")
SHORT = ConfigError("training.stream_shards", "a shard is too short\n  fix: lower it")


@pytest.mark.parametrize(
    ("error", "is_new", "enable", "kind"),
    [
        (BAD, False, True, ConfigError),  # started again, it would go in circles
        (BAD, True, True, DataError),
        (SHORT, True, True, DataError),
        (GONE, False, True, StorageError),
        (GONE, False, False, StorageError),  # there is nothing to lose
        (GONE, True, True, DataError),
        (GONE, True, False, TrainingError),
    ],
)
def test_only_what_may_pass_is_started_again_without_a_step(error, is_new, enable, kind) -> None:
    config = Checkpoint(enable=enable)
    told = _as_plain(error)  # by the rank that has it
    with pytest.raises(kind, match="rank 1: ") as caught:
        raise_data_error(config, {1: told}, 7, is_new=is_new)
    assert type(caught.value) is kind
    assert str(caught.value).count("fix: ") <= 1


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
