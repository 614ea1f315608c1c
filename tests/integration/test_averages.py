"""Averaged weights of whole jobs: resumed to the bit, validated, exported, merged from any mesh."""

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.state import AVERAGE, MODEL
from tests.helpers.cli import checkpoint, export
from tests.helpers.compare_checkpoints import assert_same_tensors, tensors
from tests.helpers.hf import tensors_of
from tests.helpers.jobs import records, train_on_ranks

pytestmark = pytest.mark.slow
DECAY = 0.5
COMMON = ("--checkpoint.interval", 2, "--checkpoint.keep_latest_k", 0)
STILL = ("--optimizer.lr", 1e-30, "--optimizer.weight_decay", 0)
"""So that weights stay as they are loaded."""
MEAN = (
    *("--checkpoint.average.decay", DECAY, "--validation.enable", "--validation.freq", 4),
    *("--validation.num_samples", 8, "--validation.dataset_split", "validation"),
)
MESHES = {
    "tp": ("--parallelism.tensor_parallel_degree", 2),
    "pp": ("--parallelism.pipeline_parallel_degree", 2),
}


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoint" / f"step-{number}"


def train(folder: Path, steps: int, *words: object) -> None:
    train_on_ranks(folder, *COMMON, "--training.steps", steps, *words)


def test_a_mean_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """On other meshes: `meshwright prove`, with a config that has one."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, 8, *MEAN)
    train(resumed, 4, *MEAN, "--lr_scheduler.total_steps", 8)
    train(resumed, 8, *MEAN)
    assert_same_tensors(step(whole, 8), step(resumed, 8))
    found = [records(folder)[-1] for folder in (whole, resumed)]
    for name in ("validation/loss", "average/validation/loss"):
        assert found[0][name] == found[1][name]
    assert found[0]["validation/loss"] != found[0]["average/validation/loss"]

    # the mean of the weights after every step, as all of them are saved
    saved = tensors(step(whole, 8))
    names = [name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)]
    assert {AVERAGE + name for name in names} == {n for n in saved if n.startswith(AVERAGE)}
    before, after = tensors(step(whole, 6)), saved
    assert any(not torch.equal(before[AVERAGE + n], after[AVERAGE + n]) for n in names)

    # validated as it is: another job that starts from it, as Hugging Face's folder, has its loss
    export([str(step(whole, 8)), str(tmp_path / "hf"), "--average", "--dtype", "float32"])
    exported = tensors_of(tmp_path / "hf")
    assert torch.equal(exported["model.norm.weight"], saved[f"{AVERAGE}norm.weight"])
    start = ("--checkpoint.initial_load_path", tmp_path / "hf", "--checkpoint.initial_load_in_hf")
    train(tmp_path / "again", 1, *MEAN, *start, *STILL)
    again = records(tmp_path / "again")[-1]["validation/loss"]
    assert again == pytest.approx(found[0]["average/validation/loss"], rel=1e-6)


def test_merges_from_three_meshes_are_the_same_bits(tmp_path: Path) -> None:
    """The same weights, saved on three meshes: two start from a run of dp_shard, and save anew."""
    first = tmp_path / "first"
    train(first, 4)
    ways = ["--steps", "2,4", "--weights", "ema=0.75", "--out"]
    checkpoint(["merge", str(first), *ways, str(tmp_path / "merged")])
    merged = [tensors(tmp_path / "merged/step-4")]
    for name, words in MESHES.items():
        run = tmp_path / name
        for number in (2, 4):
            start = ("--checkpoint.initial_load_path", step(first, number))
            train(run, number, *words, *start, *STILL, "--checkpoint.folder", f"c{number}")
        run.joinpath("checkpoint").mkdir()
        for number in (2, 4):
            (run / f"c{number}/step-{number}").rename(run / f"checkpoint/step-{number}")
        out = tmp_path / f"merged_{name}"
        checkpoint(["merge", str(run / "checkpoint"), *ways, str(out)])
        merged.append(tensors(out / "step-4"))
    parts = [tensors(step(first, number)) for number in (2, 4)]
    for name, got in merged[0].items():
        assert all(torch.equal(got, other[name]) for other in merged[1:]), name
        want = parts[0][name].double() * 0.75 + parts[1][name].double() * 0.25
        assert torch.equal(got, want.float()), name
