"""The exact record of steps, and what the history says of a start."""

import dataclasses
import json
import socket
from pathlib import Path

import pytest
import torch

from meshwright.models.parameter import block_of
from meshwright.system import modules
from meshwright.train.fingerprints import bit_sum, fingerprints
from tests.helpers.job import Job, mesh
from tests.helpers.jobs import records, train_alone, train_on_ranks
from tests.helpers.tiny import CPU, TINY

MESHES = [
    mesh(),
    mesh(dp_shard=2),
    mesh(dp_shard=2, tp=2),
    mesh(dp_replicate=2, dp_shard=2),
    mesh(pp=2),
    mesh(dp_shard=2, cp=2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_the_sum_of_bits_is_exact_in_any_order_and_shows_a_flipped_bit(dtype) -> None:
    values = torch.randn(100_003).mul(100).to(dtype)
    total = bit_sum(values)
    assert bit_sum(values.flip(0)) == total
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values.view(kinds[dtype.itemsize])[777] ^= 1
    assert abs(bit_sum(values) - total) == 1


def _fingerprints(dims, args) -> dict[str, list[str]]:
    """Of the seed's weights, with moments that are made of them."""
    job = Job(dims, num_microbatches=2, args=args)
    groups = list(dict.fromkeys(map(block_of, args.table.parameters)))
    parameters = dict(job.model.named_parameters_once())
    for parameter in parameters.values():
        job.optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": parameter.detach() * 2,
            "exp_avg_sq": parameter.detach() * 0.5,
        }
    return fingerprints(parameters.items(), job.optimizer.state, groups, CPU)


@pytest.mark.parametrize("is_tied", [False, True])
def test_fingerprints_are_the_same_on_every_mesh(on_ranks, is_tied) -> None:
    """Replicas, uneven shards and a pipeline's copy of a tied embedding count once."""
    args = dataclasses.replace(TINY, tie_embeddings=is_tied)
    found = [on_ranks(dims.num_ranks, _fingerprints, dims, args) for dims in MESHES]
    assert len(found[0][0]["weights"]) == 3 + (2 if is_tied else 3)
    assert all(of_rank == found[0][0] for of_ranks in found for of_rank in of_ranks)


def test_a_run_has_a_line_for_each_step_and_fingerprints_of_logged_ones(tmp_path: Path) -> None:
    words = ["--metrics.log_freq", 4, "--metrics.every_step", "true"]
    words += ["--metrics.grad_norm_by_group", "true"]
    train_on_ranks(tmp_path, *words, "--training.steps", 10)
    rows = records(tmp_path, "steps")
    assert [row["step"] for row in rows] == list(range(11))
    logged = [row["step"] for row in rows if "weights" in row]
    assert logged == [0, *(row["step"] for row in records(tmp_path))] == [0, 1, 4, 8, 10]
    for row in records(tmp_path):
        line = rows[row["step"]]
        assert (line["loss"], line["grad_norm"]) == (row["loss/train"], row["optim/grad_norm"])
        norms = [row[f"optim/grad_norm/{group}"] for group in rows[0]["groups"]]
        assert line["norms"] == norms
    # on another mesh the first weights are the same, and a resume continues the file
    before = (tmp_path / "steps.jsonl").read_text()
    train_alone(tmp_path, *words, "--training.steps", 12)
    assert (tmp_path / "steps.jsonl").read_text().startswith(before)
    assert [row["step"] for row in records(tmp_path, "steps")] == list(range(13))
    # without `every_step` only logged steps have a line, and without groups no norms of them
    train_alone(tmp_path / "one", "--metrics.log_freq", 4, "--training.steps", 6)
    first, *others = records(tmp_path / "one", "steps")
    assert first == rows[0]
    assert [row["step"] for row in others] == [1, 4, 6]
    assert "norms" not in others[0]


def test_the_history_has_what_decides_about_a_run(tmp_path: Path) -> None:
    train_on_ranks(tmp_path, "--training.steps", 1)
    start = records(tmp_path, "history")[0]
    assert start["source"] == modules.source_hash()
    assert start["git"] == modules.git_state()
    assert start["gpus"] == {socket.gethostname(): {"0": "", "1": ""}}
    assert start["kernels"]["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert start["kernels"]["threads"] == 1
    assert start["kernels"]["deterministic"] is False
    manifest = json.loads((tmp_path / "checkpoint/step-1/checkpoint.json").read_text())
    assert start["data_content"] == manifest["data_content"]
    assert start["tokenizer"] == manifest["data_identity"]["model.tokenizer_path"]
    assert start["versions"].keys() == manifest["versions"].keys() | {"python"}


def test_the_commit_is_that_of_the_package(monkeypatch, tmp_path: Path) -> None:
    """Not of a checkout around a virtual environment, which doesn't track it."""
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(modules, "PACKAGE", package)
    assert modules.git_state() == {}
    monkeypatch.setattr(modules, "PACKAGE", tmp_path)
    (tmp_path / "__init__.py").touch()
    user = ["-c", "user.name=a", "-c", "user.email=a@example"]
    modules._git("init")
    modules._git("add", "__init__.py")
    modules._git(*user, "commit", "-m", "first")
    state = modules.git_state()
    assert len(str(state["commit"])) == 40
    assert state["is_clean"] is True
    (tmp_path / "__init__.py").write_text("1")
    assert modules.git_state() == state | {"is_clean": False}
    monkeypatch.setattr(modules, "PACKAGE", package)
    assert modules.git_state() == {}
