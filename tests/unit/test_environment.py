"""scripts/environment.sh installs again where a requirement has changed, and only there."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def requirements(repository: Path) -> str:
    script = f'source "{repository}/scripts/environment.sh"; requirements'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return done.stdout


def test_a_setting_of_lint_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "requirements.txt", "scripts/environment.sh"):
        shutil.copyfile(ROOT / name, tmp_path / name)  # without its mode: it may be read-only
    before, text = requirements(tmp_path), (tmp_path / "pyproject.toml").read_text()
    assert all(part in before for part in ('"torch>=', '"pytest>=', "meshwright.__main__:start"))
    (tmp_path / "pyproject.toml").write_text(text.replace("line-length = 100", "line-length = 99"))
    assert requirements(tmp_path) == before
    (tmp_path / "pyproject.toml").write_text(text.replace('"torch>=', '"torch>=9'))
    assert requirements(tmp_path) != before


def test_another_system_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    (fake := tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    fake.chmod(0o755)
    script = f'PATH={tmp_path}:$PATH; source "{ROOT}/scripts/environment.sh"; prepare_environment'
    program = "import sys; sys.platform = 'darwin'; import meshwright"
    for words, name in (
        (["bash", "-c", script], "Darwin"),
        ([sys.executable, "-c", program], "darwin"),
    ):
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"meshwright: it runs on Linux, and this is {name}\n  fix: a L"
        )
