"""`meshwright checkpoint`, on checkpoints without a job."""

import dataclasses
import errno
import json
import math
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.retention import apply_retention
from meshwright.checkpoint.store import find_candidates, list_checkpoints
from meshwright.commands import checkpoint as of_checkpoints
from meshwright.config.changes import changed, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import checkpoint as main
from tests.helpers.files import flip_bit
from tests.helpers.hf import SMALL, save_checkpoint
from tests.helpers.tiny import plain_model


def run(capsys, *words: object) -> tuple[int, list[str]]:
    """Exit code, and the lines that were printed."""
    capsys.readouterr()
    try:
        main([str(word) for word in words])
        code = 0
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A dump folder with what can be in one."""
    folder = tmp_path_factory.mktemp("dump") / "checkpoint"
    for step in (5, 10, 15):
        save_checkpoint(folder, plain_model(SMALL), SMALL, step)
    (folder / "step-15" / ".metadata").unlink()
    shutil.copytree(folder / "step-5", folder / "step-8.aside0")
    listing.unfinished_folder(folder, 20).mkdir()
    return folder


@pytest.fixture
def copied(made, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "dump" / made.name))


def test_ls_lists_all_by_step_and_marks_the_newest_good_one(made, capsys) -> None:
    code, lines = run(capsys, "ls", made.parent)
    assert code == 0
    assert run(capsys, "ls", made) == (0, lines)
    states = {line.split()[0]: line[lines[0].index("STATE") :] for line in lines[1:]}
    assert states == {
        "step-5": "complete",
        "step-8.aside0": "set aside",
        "step-10": "complete, newest",
        "step-15": "damaged: .metadata: No such file or directory",
        "step-20.0000000000000000.unfinished": "unfinished",
    }
    (made / "step-10" / "checkpoint.json").rename(made / "kept")
    try:
        _, lines = run(capsys, "ls", made)
    finally:
        (made / "kept").rename(made / "step-10" / "checkpoint.json")
    assert "damaged: checkpoint.json cannot be read" in lines[3]
    assert lines[1].endswith("complete, newest")


def test_show_prints_the_config_as_a_toml_of_any_mesh(copied, tmp_path, capsys) -> None:
    saved = changed(JobConfig(), {"optimizer": {"lr": 0.02}, "training": {"max_norm": math.inf}})
    start = {"load_step": 5, "rewind_to": 5}  # one of them at a time, in fact
    of_job = {"parallelism": {"data_parallel_shard_degree": 4}, "checkpoint": start}
    config = to_json(changed(saved, of_job))
    config["training"]["gone"] = 1  # of another version
    set_manifest(copied / "step-10", config=config)
    code, lines = run(capsys, "show", copied / "step-10", "--config")
    assert code == 0
    assert lines[0] == "# training.gone is left out: this version has no such key"
    assert "data_parallel_shard_degree = -1  # 4 when it was saved" in lines
    file = tmp_path / "again.toml"
    file.write_text("\n".join(lines))
    assert to_json(load_config([str(file)])) == to_json(
        changed(saved, {"job": {"config_file": str(file)}})
    )
    config["training"]["steps"] = "many"
    set_manifest(copied / "step-10", config=config)
    with pytest.raises(ConfigError, match="training.steps"):
        run(capsys, "show", copied / "step-10", "--config")


def test_show_says_what_a_checkpoint_is(copied, capsys) -> None:
    set_manifest(copied / "step-10", mesh={"dp_shard": 4, "cp": 1, "tp": 2})
    code, lines = run(capsys, "show", copied / "step-10", "--tensors")
    assert code == 0
    facts = {line.split("  ")[0]: line for line in lines if line and not line.startswith(" ")}
    numel = sum(p.numel() for p in plain_model(SMALL).parameters())
    assert f"llama, {numel:,} parameters" in facts["model"]
    assert facts["step"].endswith(" 10")
    assert facts["loss"].endswith(" 1.5000")
    assert facts["mesh"].endswith("  dp_shard 4 x tp 2 (8 ranks)")
    assert "  n_kv_heads       2" in lines
    assert "crc32" in facts["__0_0.distcp"]
    row = next(line for line in lines if line.startswith("model.layers.1.attention.wk.weight"))
    assert row.split()[1:] == ["16x32", "float32", "2048"]
    with pytest.raises(ConfigError, match="is damaged: .metadata: No such file"):
        run(capsys, "show", copied / "step-15")


@pytest.mark.parametrize(
    "forged",
    [
        {"data": {"sample": "many"}},
        {"data_content": {"a": ""}, "data": {"counts": [1], "places": {"a": {"0": {}}}}},
        {"model_name": "\ud800"},
        {"files": {}},
    ],
)
def test_show_refuses_a_forged_manifest_in_one_line(made, forged, tmp_path, capsys) -> None:
    copy = shutil.copytree(made / "step-10", tmp_path / "step-10")
    set_manifest(copy, **forged)
    with pytest.raises(ConfigError, match="forged or damaged|has no record of .metadata") as error:
        run(capsys, "show", copy)
    assert "\n" not in str(error.value).partition("\n  fix: ")[0]


def test_verify_reads_every_byte(made, capsys, tmp_path) -> None:
    code, lines = run(capsys, "verify", made.parent)
    assert code == 1
    assert lines == [
        "step-5: good",
        "step-10: good",
        "step-15: damaged: .metadata: No such file or directory",
    ]
    assert run(capsys, "verify", made / "step-10") == (0, ["step-10: good"])
    assert run(capsys, "verify", made / "step-8.aside0") == (0, ["step-8.aside0: good"])
    copy = shutil.copytree(made / "step-10", tmp_path / "step-10")
    flip_bit(copy / "__0_0.distcp", 9999)
    code, lines = run(capsys, "verify", copy)
    assert (code, len(lines)) == (1, 1)
    assert "the content of __0_0.distcp has changed" in lines[0]
    set_manifest(copy, files={})  # the index is one of the files, whatever a manifest says
    lines = [f"{copy.name}: damaged: checkpoint.json has no record of .metadata"]
    assert run(capsys, "verify", copy) == (1, lines)
    flip_bit(copy / "checkpoint.json", 999)
    assert run(capsys, "verify", copy)[0] == 1


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_what_is_no_checkpoint_is_refused(command, tmp_path, made, capsys) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"(no such folder|holds no checkpoint)\n  fix: "):
            run(capsys, command, path)
    if command != "ls":
        with pytest.raises(ConfigError, match="is not a complete|holds no checkpoint"):
            run(capsys, command, listing.unfinished_folder(made, 20))


def test_a_checkpoint_is_not_deleted_while_it_is_read(copied, capsys, monkeypatch) -> None:
    kept: list[int] = []
    keep_one = lambda *_: kept.extend(apply_retention(copied, 1)) or []  # noqa: E731
    monkeypatch.setattr(integrity, "verify", keep_one)
    run(capsys, "verify", copied / "step-5")
    assert kept == [5]


def test_a_damaged_checkpoint_is_neither_shown_nor_compared(made, copied, capsys) -> None:
    shutil.rmtree(copied / "step-15")
    flip_bit(copied / "step-10" / "__0_0.distcp", 9999)
    flip_bit(copied / "step-5" / ".metadata", 99)
    with pytest.raises(ConfigError, match=r"is damaged: the content of __0_0.distcp has changed"):
        run(capsys, "diff", copied / "step-10", made / "step-10")
    with pytest.raises(ConfigError, match=r"is damaged: the content of .metadata has changed"):
        run(capsys, "show", copied / "step-5")
    code, lines = run(capsys, "show", copied)  # of which the tensors' content is not read
    assert code == 0
    assert lines[0].endswith("step-10")


def test_ls_takes_what_it_finds(copied, capsys, monkeypatch) -> None:
    """A link that leads nowhere; a checkpoint that is deleted meanwhile; what may not be read."""
    (copied / "step-10" / "__0_0.distcp").unlink()
    (copied / "step-10" / "__0_0.distcp").symlink_to("nowhere")
    assert "damaged: __0_0.distcp: No such file" in run(capsys, "ls", copied)[1][3]

    def delete(num_bytes: int) -> str:
        shutil.rmtree(copied / "step-5", ignore_errors=True)
        return "1 B"

    monkeypatch.setattr(of_checkpoints, "_size", delete)
    names = [line.split()[0] for line in run(capsys, "ls", copied)[1]]
    assert names[:2] == ["NAME", "step-8.aside0"]
    forbidden = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "step-8"))
    monkeypatch.setattr(of_checkpoints, "_row", forbidden)
    with pytest.raises(ConfigError, match="step-8: Permission denied"):
        run(capsys, "ls", copied)


def test_verify_calls_no_checkpoint_damaged_that_a_job_deletes(copied, capsys, monkeypatch) -> None:
    shutil.rmtree(copied / "step-15")  # which is damaged
    inspect = integrity.inspect

    def inspect_late(path: Path) -> dict:
        shutil.rmtree(copied / "step-5", ignore_errors=True)
        return inspect(path)

    monkeypatch.setattr(integrity, "inspect", inspect_late)
    lines = ["step-5: deleted meanwhile", "step-10: good"]
    assert run(capsys, "verify", copied.parent) == (0, lines)


def test_diff_of_tensors_says_how_many_by_how_much_and_where(made, tmp_path, capsys) -> None:
    assert run(capsys, "diff", made / "step-5", made / "step-10", "--tensors")[0] == 0
    model = plain_model(SMALL)
    a = save_checkpoint(tmp_path / "a", model, SMALL)
    was = model.layers["1"].attention.wk.weight[3, 7].item()
    with torch.no_grad():
        model.layers["1"].attention.wk.weight[3, 7] += 0.25
        model.norm.weight[4] = torch.nan
    code, lines = run(capsys, "diff", a, save_checkpoint(tmp_path / "b", model, SMALL))
    assert code == 1
    total = len(list(SMALL.table.parameters))
    assert f"tensors: {total - 2} of {total} are equal to the bit" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("TENSOR"))
    of_wk, of_norm = sorted(line.split() for line in lines[start + 1 :])
    assert of_wk[:5] == ["model.layers.1.attention.wk.weight", "1", "512", "0.25", "3,7"]
    assert [float(value) for value in of_wk[5:]] == pytest.approx([was, was + 0.25], rel=1e-6)
    assert of_norm == ["model.norm.weight", "1", "32", "inf", "4", "1", "nan"]


def test_diff_compares_bits_and_finds_the_largest_in_any_chunk(monkeypatch) -> None:
    from meshwright.checkpoint import reader as compare

    monkeypatch.setattr(compare, "CHUNK", 4)
    a = torch.arange(12.0).view(3, 4)
    b = a.clone()
    assert compare.compare("x", a, b) is None
    b[0, 0] = -0.0  # equal, but for a bit
    found = compare.compare("x", a, b)
    assert (found.count, found.largest, found.index) == (1, 0.0, (0, 0))
    b[0, 1] += 1
    b[2, 3] += 3
    b[1, 0] -= 2
    found = compare.compare("x", a, b)
    assert (found.count, found.largest) == (4, 3.0)
    assert (found.index, found.a, found.b) == ((2, 3), 11.0, 14.0)
    assert compare.compare("x", torch.tensor(1.0), torch.tensor(2.0)).index == ()


def test_diff_names_what_one_of_them_lacks(made, tmp_path, capsys) -> None:
    other = dataclasses.replace(SMALL, n_layers=2, hidden_dim=64)
    b = save_checkpoint(tmp_path, plain_model(other), other)
    set_manifest(b, config={"training": {"steps": 3}, "added": 1})
    code, lines = run(capsys, "diff", made / "step-5", b)
    assert code == 1
    found = [line.split() for line in lines]
    for line in (
        "model.layers.2.ffn_norm.weight: float32 32 in A, absent in B",
        "model.layers.0.feed_forward.w1.weight: float32 66x32 in A, float32 64x32 in B",
        "model_args.n_layers 3 2",
        "training absent {steps = 3}",
        "config, keys that differ: 2",
    ):
        assert line.split() in found, line


def save(folder: Path, names: str) -> Path:
    """A checkpoint of small tensors alone."""
    tensors = torch.nn.ParameterDict({name: torch.ones(3) for name in names.split()})
    return save_checkpoint(folder, tensors, SMALL, prefix="")


def test_a_tensor_more_or_another_manifest_is_a_difference(made, tmp_path, capsys) -> None:
    a, b = save(tmp_path / "a", "model_x"), save(tmp_path / "b", "model_x model_y")
    for pair in ((a, b), (b, a)):
        code, lines = run(capsys, "diff", *pair, "--tensors")
        assert (code, "tensors: 1 of 2 are equal to the bit" in lines) == (1, True)
    code, lines = run(capsys, "diff", made / "step-5", made / "step-10")
    assert (code, "manifest, keys that differ: 1" in lines) == (1, True)
    copy = shutil.copytree(a, tmp_path / "copy")
    long = "x" * 200
    set_manifest(a, config={"same": 1, "text": f"{long}y"})
    set_manifest(copy, config={"same": 1, "text": f"{long}z", "added": None})
    code, lines = run(capsys, "diff", a, copy)
    found = [line.split() for line in lines]
    assert ["text", f'"{long}y"', f'"{long}z"'] in found
    assert (code, ["added", "absent", "null"] in found) == (1, True)


def test_where_a_job_writes_is_shown_and_is_no_difference(tmp_path, capsys) -> None:
    """Of two runs of one config, that is all that differs."""
    a = save(tmp_path / "a", "model_x")
    b = shutil.copytree(a, tmp_path / "b")
    job = {"dump_folder": "outputs/a", "config_file": "a.toml"}
    set_manifest(a, config={"job": job, "training": {"steps": 3}})
    job = {"dump_folder": "outputs/b", "config_file": "b.toml"}
    set_manifest(b, config={"job": job, "training": {"steps": 3}})
    code, lines = run(capsys, "diff", a, b)
    assert code == 0
    assert ["job.dump_folder", "'outputs/a'", "'outputs/b'"] in [line.split() for line in lines]
    assert any("wherever it writes: job.dump_folder, job.config_file" in line for line in lines)
    set_manifest(b, config={"job": job, "training": {"steps": 4}})
    assert run(capsys, "diff", a, b)[0] == 1
    for one in (a, b):  # a fact of a script's, of which nothing is known
        set_manifest(one, config={}, job={"dump_folder": one.name})
    assert run(capsys, "diff", a, b)[0] == 1


def test_ranks_that_the_other_mesh_lacks_are_no_difference(tmp_path, capsys) -> None:
    folders = []
    for ranks in (1, 2):
        model = torch.nn.ParameterDict({"x": torch.ones(3)})
        for rank in range(ranks):
            model[f"rank_{rank}"] = torch.full((2,), float(rank))
        folders.append(save_checkpoint(tmp_path / str(ranks), model, SMALL, prefix="rng.cpu."))
    code, lines = run(capsys, "diff", *folders)
    assert code == 0, lines
    assert any("  rng.cpu.rank_1: absent in A, " in line for line in lines)
    manifest = json.loads((folders[1] / "checkpoint.json").read_text())
    assert manifest["files"]["__0_0.distcp"]["crc32"]  # which differ, and count for nothing


def test_models_of_other_formats_are_no_checkpoints(tmp_path) -> None:
    """A dump folder with {dump_folder}/hf/step-N, which a job writes at its end."""
    for name in ("checkpoint/step-7/checkpoint.json", "hf/step-7/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    place, step = NamedPath("FOLDER", tmp_path), tmp_path / "checkpoint/step-7"
    assert find_candidates(place) == [step]
    assert list_checkpoints(place) == [step]
