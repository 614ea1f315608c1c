"""What counts as a checkpoint, whenever the writer was killed."""

from pathlib import Path

import pytest

from meshwright.checkpoint import commit
from meshwright.errors import ConfigError


def save(folder: Path, step: int, text: str = "") -> None:
    unfinished = commit.unfinished_folder(folder, step)
    unfinished.mkdir(parents=True)
    (unfinished / "tensors").write_text(text)
    commit.publish(folder, step, {"step": step})


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert commit.saved_steps(tmp_path / "none") == []
    save(tmp_path, 5)
    save(tmp_path, 10)
    commit.unfinished_folder(tmp_path, 15).mkdir()  # killed while writing
    (tmp_path / "step-20-copy").mkdir()
    assert commit.saved_steps(tmp_path) == [5, 10]
    assert commit.choose_step(tmp_path, -1) == 10
    assert commit.choose_step(tmp_path, 5) == 5
    with pytest.raises(ConfigError, match="load_step = 15.*: 5, 10"):
        commit.choose_step(tmp_path, 15)
    (tmp_path / "step-4.deleted").mkdir()  # killed while deleting
    commit.clean_up(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-10", "step-20-copy", "step-5"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_kill_before_the_rename_publishes_nothing(tmp_path: Path, monkeypatch, call) -> None:
    def die(*args: object) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 5)
    monkeypatch.setattr("os.fsync" if call == "fsync" else "pathlib.Path.rename", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 10)
    assert commit.saved_steps(tmp_path) == [5]


def test_a_step_saved_again_takes_the_name_and_deletes_nothing(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        save(tmp_path, 5, text)
    found = {path.name: (path / "tensors").read_text() for path in tmp_path.iterdir()}
    assert found == {"step-5": "third", "step-5.aside0": "first", "step-5.aside1": "second"}
    assert commit.saved_steps(tmp_path) == [5]


def test_later_checkpoints_are_set_aside(tmp_path: Path) -> None:
    for step in (4, 6, 8):
        save(tmp_path, step)
    assert len(commit.set_aside_later(tmp_path, 4)) == 2
    save(tmp_path, 5)
    commit.keep_latest(tmp_path, 1)
    assert commit.saved_steps(tmp_path) == [5]
    assert (tmp_path / "step-8.aside0").is_dir()


def test_a_damaged_manifest_is_a_config_error(tmp_path: Path) -> None:
    save(tmp_path, 5)
    manifest = tmp_path / "step-5" / "checkpoint.json"
    manifest.write_text("{")
    with pytest.raises(ConfigError, match="checkpoint.json: cannot be read"):
        commit.read_manifest(tmp_path / "step-5")
    manifest.unlink()
    (tmp_path / "step-6").write_text("a file")
    assert commit.saved_steps(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 20):
        save(tmp_path, step)
    commit.keep_latest(tmp_path, 0)
    assert commit.saved_steps(tmp_path) == [5, 10, 20, 100]
    commit.keep_latest(tmp_path, 3)
    assert commit.saved_steps(tmp_path) == [10, 20, 100]
    commit.keep_latest(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-100"]
