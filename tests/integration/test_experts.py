"""A whole job with experts on two ranks: its figures, a kill, and a resume on another mesh."""

import json
from pathlib import Path

import pytest

from tests.helpers.jobs import records, train_on_ranks
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
    train_on_ranks(folder, *EP, config=config)
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
