"""A path that cannot be looked at is one clear error, whichever key or command it is given to."""

import itertools
import json
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.commands.main import run
from meshwright.config import loader
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.system.lease import Lease
from meshwright.train import facts
from tests.unit.test_config import PATH_KEYS

NOBODY = 65534
IN_DUMP_FOLDER = {key for key in PATH_KEYS if "_folder" in key or key.endswith(".folder")} - {
    *("job.dump_folder", "training.token_cache_folder"),
}
KEYS = (*PATH_KEYS, "model.flavor", "experimental.custom_import")
TOO_LONG = "/tmp/" + "x" * 300
COMMANDS = (
    *(["checkpoint", name] for name in ("ls", "show", "verify")),
    *(["report"], ["generate", "--prompt", "a"]),
)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def error_of(words: Sequence[object]) -> str:
    """Return the message of a user's mistake; otherwise the traceback, or nothing."""
    try:
        run([str(word) for word in words])
    except ConfigError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return "no error"


def errors_with(path: str, folder: Path, keys: Sequence[str] = KEYS) -> dict[str, str]:
    """Return the error of each key on the command line and in a TOML, and of each command."""
    found, toml = {}, folder / "a.toml"
    for key in keys:
        section, name = key.split(".")
        toml.write_text(f'extends = "debug_model"\n[{section}]\n{name} = "{path}"\n')
        found[key] = error_of(["check", "debug_model", f"--{key}", path])
        found[f"{key} in a TOML"] = error_of(["check", toml])
    toml.write_text(f'extends = "{path}"\n')
    found["extends"] = error_of(["check", toml])
    found["CONFIG"] = error_of(["check", path])
    return found | {" ".join(words): error_of([*words, path]) for words in COMMANDS}


def check_errors(found: dict[str, str], path: str, reason: str) -> None:
    for where, error in found.items():
        assert "Traceback" not in error, (where, error)
        assert reason in error, (where, error)
        assert path in error, (where, error)
        assert error.count("\n  fix: ") == 1, (where, error)
        if where.endswith("TOML"):
            assert "a.toml:3: " in error, (where, error)


def test_names_that_no_file_can_have(open_folder: Path) -> None:
    check_errors(errors_with(TOO_LONG, open_folder), TOO_LONG, ": file name too long")
    inside = f"--training.dataset_path={TOO_LONG}/a.jsonl"
    error = error_of(["check", "debug_model", f"--job.dump_folder={TOO_LONG}", inside])
    assert error.count("file name too long") == 1
    expanded = [key for key in KEYS if key not in IN_DUMP_FOLDER]
    found = errors_with("~nouser/x", open_folder, expanded)
    check_errors(found, "~nouser/x", ": there is no user nouser")
    # otherwise a job would make a folder called so
    check_errors(errors_with("$NONE/x", open_folder), "$NONE/x", ": variables are not replaced")


def test_a_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(["--model.tokenizer_path=~/tokens", "--job.dump_folder=~/runs"])
    assert config.model.tokenizer_path == "/home/me/tokens"
    assert config.job.dump_folder == "/home/me/runs"


def errors_as_nobody(path: str, folder: Path) -> dict[str, str]:
    """As root the suite may enter every folder, so a forked child becomes nobody."""
    (mine := folder / "mine").mkdir()
    os.chown(mine, NOBODY, NOBODY)
    for name in ("train_configs", "assets"):  # nobody may not enter the checkout either
        shutil.copytree(loader.FOLDER.parent / name, mine / name)
    errors_with(path, folder)  # imports root's modules, which nobody cannot
    answer = mine / "errors.json"
    if (child := os.fork()) == 0:
        with suppress(BaseException):  # pytest is the parent's
            loader.FOLDER = mine / "train_configs"
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.chdir(mine)
            answer.write_text(json.dumps(errors_with(path, mine)))
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(answer.read_text())


def test_a_folder_that_one_may_not_enter(open_folder: Path) -> None:
    (locked := open_folder / "locked").mkdir(mode=0)
    path = str(locked / "inside")
    found = (errors_as_nobody if os.getuid() == 0 else errors_with)(path, open_folder)
    check_errors(found, path, ": permission denied")


def test_checkpoints_that_could_not_be_written_are_no_surprise_at_the_last_step(tmp_path) -> None:
    """A link to a file system that is not mounted, or a file of that name."""
    checkpoint = tmp_path / "checkpoint"
    words = ["check", "debug_model", f"--job.dump_folder={tmp_path}"]
    checkpoint.symlink_to(tmp_path / "scratch")
    found = error_of(words)
    assert "checkpoint is a link to no folder that can be written to" in found
    assert "checkpoint.folder = 'checkpoint'" in found
    assert error_of([*words, "--checkpoint.load_only"]) == "no error"
    (tmp_path / "scratch").mkdir()
    assert error_of(words) == "no error"
    checkpoint.unlink()
    checkpoint.touch()
    assert "checkpoint is not a folder that can be written to" in error_of(words)


def test_one_rank_tries_whether_the_dump_folder_can_be_made(tmp_path: Path, monkeypatch) -> None:
    tried = Mock(side_effect=OSError("a quota"))
    monkeypatch.setattr(facts, "TemporaryDirectory", tried)
    config = JobConfig.model_validate({"job": {"dump_folder": str(tmp_path / "new")}})
    monkeypatch.setenv("RANK", "7")
    facts.check_writable(config)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="is not a folder that can be written to"):
        facts.check_writable(config)


def test_who_needs_a_folder_of_checkpoints_alone(tmp_path: Path, capsys) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/link").symlink_to(theirs)
    lease = Lease(theirs / "job.lock")
    assert lease.take()
    words = ["check", "debug_model", f"--job.dump_folder={tmp_path}/mine"]
    for folder, is_read in itertools.product((theirs, "../theirs", "link"), (True, False)):
        run([*words, f"--checkpoint.folder={folder}", f"--checkpoint.load_only={is_read}"])
        assert ("a job that runs uses " in capsys.readouterr().out) == (not is_read), folder
    own = [f"--job.dump_folder={tmp_path}", "--checkpoint.folder=theirs"]
    run([*words[:2], *own, "--checkpoint.enable=false"])  # its records would mix with the other's
    assert f"{theirs}: process {os.getpid()} on " in capsys.readouterr().out
    lease.give_back()


def test_a_folder_that_was_moved_is_not_the_one_that_its_config_names(tmp_path, capsys) -> None:
    (moved := tmp_path / "moved to").mkdir()
    (config := moved / "config.toml").write_text('extends = "debug_model"\njob.dump_folder = "old"')
    for is_of_job in (False, True):
        run(["check", str(config)])
        fix = "fix: to continue that one, add --job.dump_folder '"
        assert (fix in capsys.readouterr().out) == is_of_job
        (moved / "history.jsonl").touch()
    named = [f"--job.dump_folder={folder}" for folder in (moved, "elsewhere")]
    for words in ([named[0]], [named[1]], []):
        run(["check", str(config), *words])
        assert "to continue" not in capsys.readouterr().out
        config.write_text(f'extends = "debug_model"\njob.dump_folder = "{moved}"')


def test_a_folder_called_like_a_preset_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug_model").mkdir()
    (tmp_path / "a.toml").write_text('extends = "debug_model"\n')
    for name in ("debug_model", "a.toml"):
        assert load_config([name]).training.dataset == "sympy_source"


def test_extends_takes_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inner := tmp_path / "configs").mkdir()
    (tmp_path / "base.toml").write_text("[training]\nsteps = 7\n")
    (inner / "a.toml").write_text('extends = "base.toml"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a.toml:1: base.toml: neither a file here nor a preset"):
        load_config(["configs/a.toml"])
    (inner / "a.toml").write_text('extends = "../bas/base.toml"\n')
    fix = re.escape(f"check the path: {tmp_path} exists, but holds no bas")
    with pytest.raises(ConfigError, match=fix):
        load_config(["configs/a.toml"])
    (inner / "a.toml").write_text('extends = "../configs/a.toml"\n')
    with pytest.raises(ConfigError, match="a.toml: extends itself, through "):
        load_config(["configs/a.toml"])
