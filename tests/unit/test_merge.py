"""`meshwright checkpoint merge`: sums, weights, and everything that is refused."""

import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch

from meshwright.checkpoint import listing
from meshwright.checkpoint import merge as merging
from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.manifest import NO_JOB, read_manifest
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.checkpoint.store import Saved
from meshwright.checkpoint.writer import write
from meshwright.commands.checkpoint_merge import shares_of
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from meshwright.system.processes import fork_server
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import checkpoint as main
from tests.helpers.cli import command
from tests.helpers.hf import SMALL, save_checkpoint
from tests.helpers.resolved import resolved
from tests.helpers.tiny import plain_model

STEPS = (5, 10, 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A dump folder of three steps with different weights."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    for step in STEPS:
        save_checkpoint(folder, plain_model(SMALL, seed=step), SMALL, step)
    return folder.parent


def merge(run: Path, out: Path, steps: str = "5,10,20", weights: str = "mean") -> None:
    main(["merge", str(run), "--steps", steps, "--weights", weights, "--out", str(out)])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = plain_model(SMALL)
    parameters = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    CheckpointWeights(NamedPath("test", folder)).load(parameters)
    return parameters


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("mean", [1 / 3] * 3),
        ("linear", [1 / 6, 2 / 6, 3 / 6]),
        ("1-sqrt", [3**-0.5, (2 / 3) ** 0.5 - 3**-0.5, 1 - (2 / 3) ** 0.5]),
        ("ema=0.75", [0.75**2, 0.25 * 0.75, 0.25]),
        ("0.5,0.75,-0.25", [0.5, 0.75, -0.25]),
    ],
)
def test_a_merge_is_the_sum_in_fp64_in_the_order_of_steps(
    made, tmp_path, monkeypatch, text, shares
) -> None:
    monkeypatch.setattr("meshwright.checkpoint.merge.CHUNK", 50)  # of some tensors less than a row
    merge(made, tmp_path / "out", weights=text)
    assert shares_of(text, 3) == pytest.approx(shares, abs=1e-15)
    assert math.isclose(sum(shares), 1)
    found = weights_of(tmp_path / "out/step-20")
    models = [dict(plain_model(SMALL, seed=step).named_parameters()) for step in STEPS]
    for name, got in found.items():
        total = torch.zeros(got.shape, dtype=torch.float64)
        for share, model in zip(shares_of(text, 3), models, strict=True):
            total += model[name].detach().double() * share
        assert torch.equal(got, total.float()), name
    manifest = read_manifest(tmp_path / "out/step-20")
    assert manifest["merged"] == {"steps": [5, 10, 20], "weights": shares_of(text, 3)}
    assert manifest["model_only"]


def test_loads_of_experts_are_the_newest_steps(tmp_path) -> None:
    for step, load in ((1, [1, 5]), (2, [2, 4])):
        model = plain_model(SMALL)
        model.register_buffer("load", torch.tensor(load))
        save_checkpoint(tmp_path / "run", model, SMALL, step)
    merge(tmp_path / "run", tmp_path / "out", "1,2", "linear")
    found = CheckpointWeights(NamedPath("test", tmp_path / "out/step-2"), str).read("model.load")
    assert torch.equal(found, torch.tensor([2, 4]))  # and not 1.67 and 4.33, cut off


def test_others_take_a_merge_and_a_resume_is_refused(made, tmp_path, capsys) -> None:
    out = tmp_path / "run" / "checkpoint"
    merge(made, out, steps="5,20")
    main(["verify", str(out)])
    main(["ls", str(out)])
    assert "not-finite" not in capsys.readouterr().out  # nobody has measured its loss
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
    args = {name: getattr(SMALL, name) for name in names}
    tables = {
        "model": {"tokenizer_path": "bytes", "args": args},
        "job": {"dump_folder": str(tmp_path / "new")},
        "checkpoint": {"initial_load_path": str(out)},
    }
    resolved(JobConfig.model_validate(tables), 1)
    command("generate")([str(out), "--prompt", "a", "--max-new-tokens", "2"])
    tables |= {"job": {"dump_folder": str(tmp_path / "run")}, "checkpoint": {"enable": True}}
    with pytest.raises(ConfigError, match="the weights only: nothing resumes"):
        resolved(JobConfig.model_validate(tables), 1)


@pytest.mark.parametrize(
    ("steps", "weights", "says"),
    [
        ("5,7,8", "mean", "--steps = '7,8': not among .*\n  fix: those are 5, 10, 20"),
        ("10,5", "mean", "in ascending order"),
        ("5", "mean", "must be two steps or more"),
        ("5,x", "mean", "with commas between"),
        ("5,10", "0.5,0.6", "which sum to 1.1, not to 1"),
        ("5,10", "0.5,0.2,0.3", "3 numbers for 2 steps"),
        ("5,10", "median", "not understood"),
        ("5,10", "ema=1.5", "one decay between 0 and 1"),
    ],
)
def test_bad_steps_and_weights_are_one_error(made, tmp_path, steps, weights, says) -> None:
    with pytest.raises(ConfigError, match=says):
        merge(made, tmp_path / "out", steps, weights)
    assert not (tmp_path / "out").exists()


def test_parts_of_different_models_are_refused(made, tmp_path) -> None:
    run = tmp_path / "run"
    save_checkpoint(run, plain_model(SMALL), SMALL, 1)
    save_checkpoint(run, plain_model(SMALL).bfloat16(), SMALL, 2)
    wide = plain_model(SMALL)
    wide.norm.weight = torch.nn.Parameter(torch.ones(7))
    save_checkpoint(run, wide, SMALL, 3)
    for step, says, of_manifest in (
        (2, "is bfloat16 .* there, and float32 .* in step-1", None),
        (3, "norm.weight is float32 7 there, and float32 32", None),
        (4, "is of a different model than step-1: qwen3 instead", {"model_name": "qwen3"}),
        (5, "is of a different size than step-1", {"model_args": {"dim": 8}}),
        (6, "different tokenizer", {"data_identity": {"model.tokenizer_path": "other"}}),
    ):
        if of_manifest:
            set_manifest(save_checkpoint(run, plain_model(SMALL), SMALL, step), **of_manifest)
        with pytest.raises(ConfigError, match=says):
            merge(run, tmp_path / "out", f"1,{step}")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_taken_or_a_runs_own_is_refused(made, tmp_path) -> None:
    merge(made, tmp_path / "out", "5,10")
    with pytest.raises(ConfigError, match="step-10 is there\n  fix: choose a different"):
        merge(made, tmp_path / "out", "5,10")
    with pytest.raises(ConfigError, match="is inside of .*\n  fix: name a folder elsewhere"):
        merge(made, made / "merged", "5,10")
    with pytest.raises(ConfigError, match="no such folder"):
        merge(tmp_path / "none", tmp_path / "other", "5,10")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: .*Not a directory|File exists"):
        merge(made, tmp_path / "file", "5,10")


def test_a_full_disk_leaves_nothing(made, tmp_path, monkeypatch) -> None:
    def fails(like: object, unfinished: Path, *_: object) -> None:
        unfinished.mkdir(parents=True)
        raise merging.CheckpointException(
            "write", {0: (OSError(28, "No space left on device"), None)}
        )

    monkeypatch.setattr(merging, "write", fails)
    with pytest.raises(ConfigError, match="--out = .* cannot be written: No space left on device"):
        merge(made, tmp_path / "out", "5,10")
    assert not (tmp_path / "out").exists()


KIB_OF_TENSOR = 1 << 17


def peak_of_a_merge(parts: list[Saved], folder: Path) -> float:
    """Above the process before it, in tensors."""
    saved, before = read_saved_tensors(parts[0].place), getrusage(RUSAGE_SELF).ru_maxrss
    merging.merge(parts, [0.5, 0.25, 0.25], saved, folder)
    return (getrusage(RUSAGE_SELF).ru_maxrss - before) / KIB_OF_TENSOR


@pytest.mark.slow
def test_a_merge_takes_the_memory_of_the_sum_and_of_one_part(tmp_path) -> None:
    """3.3 to 3.7 tensors of fp32, 4.5 at most of half the size; 5.11 if a part is read before it
    is added."""
    parts = []
    for step in (1, 2, 3):
        tensors = {f"model.{i}": torch.randn(KIB_OF_TENSOR // 4, 1024) for i in range(3)}
        unfinished = listing.unfinished_folder(tmp_path, step)
        write(tensors, unfinished, NO_JOB | {"step": step}, None, None)
        path = listing.step_folder(tmp_path, step)
        parts.append(Saved(NamedPath("test", path), read_manifest(path)))
    with ProcessPoolExecutor(1, fork_server(__name__)) as pool:
        assert pool.submit(peak_of_a_merge, parts, tmp_path / "merged").result() < 4.8
