"""scripts/environment.sh takes the environment that is there, and says why it makes another."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import packaging
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def requirements(repository: Path) -> str:
    script = f'source "{repository}/scripts/environment.sh"; requirements'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return done.stdout


def copy_of_repository(folder: Path) -> None:
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "requirements.txt", "scripts/environment.sh"):
        shutil.copyfile(ROOT / name, folder / name)  # without its mode: it may be read-only


def test_a_setting_of_lint_needs_no_network(tmp_path: Path) -> None:
    copy_of_repository(tmp_path)
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
    program = "import sys; sys.platform = 'darwin'; from meshwright.__main__ import start; start()"
    for words, name in (
        (["bash", "-c", script], "Darwin"),
        ([sys.executable, "-c", program], "darwin"),
    ):
        done = subprocess.run(words, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"meshwright: it runs on Linux, and this is {name}\n  fix: a L"
        )


PREPARE = """
source "$1/scripts/environment.sh"
make_environment() { echo "made with ${3:-packages of its own}"; false; }
prepare_environment "$2"
echo "python: $python"
"""

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `prepare_environment` with one Python, whose packages are names and versions alone."""
    copy_of_repository(tmp_path / "repository")

    def run(kind: str, without: str = "", **versions: str) -> subprocess.CompletedProcess[str]:
        site, folder = tmp_path / "site", tmp_path / "environment/bin"
        shutil.rmtree(site, ignore_errors=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        site.mkdir()
        (site / "packaging").symlink_to(Path(packaging.__file__).parent)
        for needed in map(Requirement, DEPENDENCIES):
            version = versions.get(needed.name, next(iter(needed.specifier)).version)
            if needed.name not in without.split():
                info = site / f"{needed.name.replace('-', '_')}-{version}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Name: {needed.name}\nVersion: {version}\n")
        real = f"{sys.base_prefix}/bin/python3"
        if kind == "system":
            folder.mkdir(parents=True)
            real += " -S"
        else:
            venv.create(folder.parent, symlinks=True)
            real = f"'{folder.parent}/real/bin/python3'"
            venv.create(folder.parent / "real", symlinks=True)
        for name in ("python", "python3"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(f"#!/bin/sh\nPYTHONPATH='{site}' exec {real} \"$@\"\n")
            (folder / name).chmod(0o755)
        outer = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        active = {"VIRTUAL_ENV": str(folder.parent)} if kind == "active" else {}
        words = ["bash", "-euo", "pipefail", "-c", PREPARE, "-", tmp_path / "repository", ""]
        env = {**outer, **active, "PATH": f"{folder}:/usr/bin:/bin"}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False)

    return run


def test_an_environment_with_all_packages_is_taken(prepare, tmp_path) -> None:
    """An active one; or that of a container, where none is active."""
    for kind, python in (("active", "python"), ("venv", "/python3"), ("system", "/python3")):
        done = prepare(kind)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("python: ")
        assert done.stdout.endswith(f"{python}\n")


@pytest.mark.parametrize("kind", ["active", "venv"])
def test_an_environment_that_lacks_a_package_is_not_passed_over(kind, prepare) -> None:
    """Its torch may be the one for the GPUs: .venv would fetch another, of 2.8 GB."""
    done = prepare(kind, "tensorboard", numpy="1.20")
    assert done.returncode == 2
    assert "made with" not in done.stdout
    assert "has torch, but lacks numpy>=1.26, tensorboard>=2.18\n  fix: " in done.stderr
    python = "python" if kind == "active" else "python3"
    assert done.stderr.endswith(f"{python} -m pip install 'numpy>=1.26' 'tensorboard>=2.18'\n")


@pytest.mark.parametrize(
    ("kind", "without", "versions", "says", "made"),
    [
        (
            "system",
            "tensorboard",
            {},
            "no environment is active.* takes the torch of /",
            "--system-site-packages",
        ),
        (
            "system",
            "torch",
            {},
            "no environment is active.* fetches torch: 2.8 GB",
            "packages of its own",
        ),
        (
            "active",
            "torch jinja2",
            {},
            "/environment has no torch .* fetches torch",
            "packages of its own",
        ),
        (
            "active",
            "",
            {"torch": "2.9.1"},
            "/environment has no torch that fits",
            "packages of its own",
        ),
    ],
)
def test_a_new_environment_is_announced_and_may_see_the_systems_torch(
    kind, without, versions, says, made, prepare
) -> None:
    done = prepare(kind, without, **versions)
    assert re.search(
        f"^meshwright: {'' if kind == 'system' else 'the active environment '}.*{says}", done.stderr
    )
    assert done.stdout == f"made with {made}\n"
    assert done.returncode == 1  # as the set-up that the test stands in for
