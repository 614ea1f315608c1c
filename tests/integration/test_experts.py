"""A whole job with experts on two ranks: its figures, a kill, and a resume on another mesh."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.jobs import losses, records, start_on_ranks, train_alone, train_on_ranks
from tests.helpers.needs import skip_without_mesh_of_experts

TOML = """
extends = "{tiny}"

[model]
name = "qwen3_moe"

[model.args]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 64
head_dim = 8
n_experts = 8
n_active = 2
expert_dim = 32

[training]
steps = 12

[experts]
bias_update_rate = 0.001

[checkpoint]
interval = 4
"""
EP = ("--parallelism.expert_parallel_degree", 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("config") / "experts.toml"
    file.write_text(TOML.format(tiny=Path(__file__).with_name("tiny.toml")))
    return file


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> Path:
    skip_without_mesh_of_experts()
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_on_ranks(folder, *EP, config=config).check_returncode()
    return folder


def test_the_figures_of_experts_are_reported(uninterrupted: Path) -> None:
    last = records(uninterrupted)[-1]
    assert 1 <= last["experts/load_max"] <= 8 / 2
    assert 0 <= last["experts/load_min"] <= 1
    assert 0 < last["experts/entropy"] <= 2.08  # log 8
    assert 0 < last["experts/bias_range"] <= 2 * 11 * 0.001 + 1e-6
    assert last["experts/balance_loss"] == pytest.approx(1, rel=0.5)
    loads = json.loads((uninterrupted / "experts.json").read_text())
    assert loads["step"] == last["step"]
    assert loads["layers"].keys() == {"0", "1"}
    means = [sum(layer) / 8 for layer in loads["layers"].values()]
    assert len(set(means)) == 1  # as many tokens in every layer
    busiest = max(max(layer) for layer in loads["layers"].values())
    assert busiest / means[0] == pytest.approx(last["experts/load_max"])


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_bit(uninterrupted, config, tmp_path) -> None:
    job = start_on_ranks(tmp_path, *EP, config=config)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint" / "step-4").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in job.ranks:
        rank.send_signal(signal.SIGKILL)
    job.wait()
    train_on_ranks(tmp_path, *EP, config=config).check_returncode()
    assert losses(tmp_path) == losses(uninterrupted)


@pytest.mark.slow
def test_a_resume_without_expert_parallelism_continues(uninterrupted, config, tmp_path) -> None:
    shutil.copytree(uninterrupted / "checkpoint", tmp_path / "checkpoint")
    for step in (12,):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    train_alone(tmp_path, config=config).check_returncode()
    want = losses(uninterrupted)
    assert losses(tmp_path)
    for step, (loss, norm) in losses(tmp_path).items():
        assert loss == pytest.approx(want[step][0], rel=1e-5), step
        assert norm == pytest.approx(want[step][1], rel=1e-4), step


QWEN3 = ("--model.name", "qwen3", "--model.args.head_dim", 8)
MIXED = (
    *("--model.name", "qwen3_moe", "--model.args.head_dim", 8, "--model.args.expert_dim", 64),
    *("--model.args.n_experts", 8, "--model.args.n_active", 2, *EP),
)


@pytest.mark.slow
def test_a_dense_job_goes_on_with_experts(tmp_path) -> None:
    skip_without_mesh_of_experts()
    train_alone(tmp_path / "dense", *QWEN3, "--training.steps", 30).check_returncode()
    load = ("--checkpoint.initial_load_path", tmp_path / "dense")
    train_alone(tmp_path / "more", *QWEN3, *load).check_returncode()
    dense, found = losses(tmp_path / "more"), {}
    for noise in (0, 0.1):
        folder = tmp_path / f"noise {noise}"
        words = *MIXED, *load, "--checkpoint.initial_load_upcycle_noise", noise
        train_on_ranks(folder, *words).check_returncode()
        found[noise] = losses(folder)
    assert losses(tmp_path / "dense")[1][0] > 1.3 * dense[1][0]  # a fresh model is far from it
    assert found[0][1][0] == pytest.approx(dense[1][0], rel=1e-5)
    for step, (loss, _) in found[0.1].items():
        assert loss == pytest.approx(dense[step][0], rel=1e-2), step
