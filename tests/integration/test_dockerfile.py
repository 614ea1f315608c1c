"""The steps of the Dockerfile, in an empty environment: a test may have no container engine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Keyword and arguments of each line that isn't a comment."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_make_an_environment_that_trains(tmp_path: Path) -> None:
    assert shutil.which("g++")  # the image installs it
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{environment}/bin:{env['PATH']}", "HOME": str(tmp_path)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    folder, words = tmp_path, list[str]()
    for keyword, rest in instructions():
        if keyword == "WORKDIR":
            folder = tmp_path / rest.strip("/")
            folder.mkdir(parents=True)
        elif keyword == "COPY":
            assert rest == ". ."
            listed = subprocess.run(
                ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
            for name in filter(None, listed.split("\0")):
                copy = folder / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy)
        elif keyword == "RUN" and rest.startswith("pip "):
            # the index of this machine stands in for torch's
            command = re.sub(r" --index-url \S+", "", rest)
            subprocess.run(["sh", "-c", f"{command} --quiet"], cwd=folder, env=env, check=True)
        elif keyword == "ENTRYPOINT":
            words = json.loads(rest)
        else:
            assert keyword in ("FROM", "ARG") or rest.startswith("apt-get "), (keyword, rest)
    job = [*words, "train", "debug_model", "--training.steps", "2"]
    job += ["--validation.enable", "false", "--checkpoint.enable", "false"]
    ended = subprocess.run(job, cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 2/2" in ended.stdout + ended.stderr
