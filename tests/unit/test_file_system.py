"""Files that appear whole, and the folder of caches."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.datasets.token_cache.tokenizing import cache_root
from meshwright.system.errors import ConfigError
from meshwright.system.files import (
    _machine_digits,
    is_running,
    remove_left_over,
    sync_folder,
    whole_file,
)


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half", None])
    assert path.read_text() == "old"
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_another_user_is_writing_is_kept(tmp_path, monkeypatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    (file := tmp_path / f"a.{_machine_digits()}-01234567.1.unfinished").touch()
    remove_left_over(tmp_path)
    assert file.exists()


def test_a_folder_that_cannot_be_opened_is_no_error(tmp_path: Path, monkeypatch) -> None:
    """Some network file systems open files alone; a folder that is gone is an error."""

    def refuse(path: Path, flags: int) -> int:
        raise OSError(code, "rejected", str(path))

    monkeypatch.setattr(os, "open", refuse)
    code = errno.EINVAL
    sync_folder(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="rejected"):
        sync_folder(tmp_path)


def test_processes_fork_below_a_folder_with_a_long_name_and_survive_ctrl_c(
    tmp_path: Path,
) -> None:
    (folder := tmp_path / ("ü" * 40)).mkdir(parents=True)
    script = (
        "import os, signal; from meshwright.system.processes import fork_server\n"
        "context = fork_server()\n"
        "from multiprocessing.forkserver import _forkserver\n"
        "os.kill(_forkserver._forkserver_pid, signal.SIGINT)\n"  # Ctrl-C, while it imports
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "process = context.Process(target=int)\n"
        "process.start(); process.join(); print(process.exitcode)"
    )
    env = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert not [*folder.iterdir()]


def test_a_given_folder_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root("/data/caches") == Path("/data/caches")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without HOME and a name
    with pytest.raises(ConfigError, match="token_cache_folder = '': this user has no home folder"):
        cache_root("")


def test_a_user_without_a_name_gets_one() -> None:
    """As a container's may be; torch 2.11 does not import otherwise."""
    script = "import os, pwd; os.environ.clear(); pwd.getpwuid = {}.__getitem__"
    script += "; import meshwright; print(os.environ)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"environ({{'LOGNAME': 'uid_{os.getuid()}'}})\n", done.stderr


def test_a_process_that_cannot_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job would take its folder."""
    for code, runs in ((errno.EMFILE, True), (errno.ENOENT, False)):
        answer = Mock(side_effect=OSError(code, "said"))
        monkeypatch.setattr(Path, "read_text", answer)
        assert is_running(os.getpid()) is runs
