"""What Slurm says of a job decides whether a command may start, and what the user is told."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.launch.restarts import check_progress
from meshwright.launch.watch import verdict
from meshwright.metrics.sinks import HISTORY
from meshwright.system.errors import ConfigError
from meshwright.system.slurm import check_tasks, job_name, node_names, warn_of_usr1
from tests.helpers.cli import command
from tests.unit.test_hang import SAME

TWO_TASKS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "2"}
HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@pytest.mark.parametrize(
    ("nodes", "env", "message"),
    [
        (None, {}, ""),
        (2, {}, ""),  # ranks by hand
        (None, {"SLURM_JOB_NUM_NODES": "1"}, ""),
        (2, TWO_TASKS, ""),
        (None, TWO_TASKS | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, ""),
        (1, {"SLURM_JOB_NUM_NODES": "2"}, ""),  # the user leaves a node idle
        (None, TWO_TASKS, "srun has started this command 2 times.*\n.*sbatch --nodes=2"),
        (1, TWO_TASKS, "srun has started this command 2 times"),
        (2, TWO_TASKS | {"SLURM_STEP_NUM_TASKS": "16"}, "started this command 16 times"),
        (None, {"SLURM_JOB_NUM_NODES": "3"}, "has 3 nodes.* one of them\n.*sbatch --nodes=3"),
    ],
)
def test_a_start_that_would_train_twice_or_leave_nodes_idle_is_rejected(nodes, env, message):
    if not message:
        check_tasks(nodes, env)
        return
    with pytest.raises(ConfigError) as error:
        check_tasks(nodes, env)
    assert re.search(message, str(error.value))


def test_a_job_of_an_array_is_called_as_squeue_calls_it() -> None:
    env = {"SLURM_JOB_ID": "23"}
    assert job_name({}) == ""
    assert job_name(env) == "23"
    assert job_name(env | {"SLURM_ARRAY_JOB_ID": "21", "SLURM_ARRAY_TASK_ID": "0"}) == "21_0"
    assert job_name(env | {"SLURM_ARRAY_TASK_ID": "0"}) == "23"  # a variable of another program


def test_nodes_are_called_by_slurm_s_names(tmp_path: Path, monkeypatch) -> None:
    assert node_names({}) == []
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && echo n1 && echo n2\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert node_names({"SLURM_JOB_NODELIST": "n[1-2]"}) == ["n1", "n2"]
    answered = {rank.host for rank in SAME[:2]}
    names = [*answered, "lost-node.cluster"]
    monkeypatch.setattr("meshwright.launch.watch.node_names", lambda env: names)
    assert verdict(SAME[:2], 4, "")[-1].endswith("heard of ranks 2-3 on lost-node.cluster")


def history(folder: Path, starts: list[tuple[str, int, int]]) -> None:
    lines = ["torn {", json.dumps({"event": "start", "step": 0})]
    for job, restart, step in starts:
        slurm = {"job": job, "restart": restart}
        lines += [json.dumps({"event": "start", "step": step, "slurm": slurm})]
    (folder / HISTORY).write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("starts", "step", "restart", "idle"),
    [
        ([], 0, 2, 0),  # not yet often
        ([], 0, 3, 3),  # none came as far as training
        ([("7", 0, 0), ("7", 1, 0), ("7", 2, 0)], 0, 3, 3),
        ([("7", 0, 0), ("7", 1, 20), ("7", 2, 40)], 60, 3, 0),
        ([("7", 0, 0), ("7", 1, 20)], 40, 4, 0),  # two starts without training since
        ([("7", 0, 0), ("7", 1, 20)], 40, 5, 3),
        ([("7", 0, 0), ("7", 1, 20), ("7", 2, 40), ("7", 3, 40), ("7", 4, 40)], 40, 5, 3),
        ([("6", 0, 0), ("6", 1, 20)], 40, 3, 3),  # another job's progress
        ([("6", 0, 0), ("7", 2, 20)], 40, 4, 0),
    ],
)
def test_a_job_that_makes_no_progress_is_not_started_for_ever(
    tmp_path: Path, starts, step, restart, idle
) -> None:
    history(tmp_path, starts)
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
    if not idle:
        check_progress(tmp_path, step, env)
        check_progress(tmp_path, step, {})  # submitted again, or outside of Slurm
        return
    words = f"the last {idle} starts saved no checkpoint after step {step}\n  fix: "
    with pytest.raises(ConfigError, match=words):
        check_progress(tmp_path, step, env)


def test_a_rank_of_plain_torchrun_says_that_usr1_would_end_it(caplog) -> None:
    caplog.set_level("WARNING", "meshwright")
    env = {"SLURM_JOB_ID": "7", "TORCHELASTIC_SIGNALS_TO_HANDLE": HANDLED}
    warn_of_usr1(env | {"SLURM_JOB_ID": ""})
    warn_of_usr1(env | {"TORCHELASTIC_SIGNALS_TO_HANDLE": HANDLED + ",SIGUSR1"})
    warn_of_usr1({"SLURM_JOB_ID": "7"})
    assert not caplog.text
    warn_of_usr1(env)
    assert f"fix: torchrun --signals-to-handle {HANDLED},SIGUSR1" in caplog.text


def test_nnodes_1_leaves_the_other_nodes_of_a_job_idle(monkeypatch) -> None:
    """The option, or the variable."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr("meshwright.commands.train.check_job", Mock(side_effect=InterruptedError))
    words = ["debug_model", "--ngpu", "1"]
    with pytest.raises(ConfigError, match="this Slurm job has 2 nodes"):
        command("train")(words)
    with pytest.raises(InterruptedError):
        command("train")([*words, "--nnodes", "1"])
    monkeypatch.setenv("NNODES", "1")
    with pytest.raises(InterruptedError):
        command("train")(words)
