"""The edits of CONTRIBUTING.md, in a copy of the repository, pass the tests that it names."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.campaigns.new_user import example
from tests.helpers.jobs import ROOT, environment

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPE = re.compile(
    r"^<!-- recipe: (\w+) -->\n```diff\n(.*?)^```\n\n```bash\n(.*?)^```", re.MULTILINE | re.DOTALL
)
RECIPES = {name: (edits, commands) for name, edits, commands in RECIPE.findall(PAGE)}


def edit(folder: Path, edits: str) -> None:
    """Make edits: after the name of a file, its lines as they are (" " and "-") and become."""
    for part in re.split(r"^\+\+\+ ", edits, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        file = folder / name
        text = file.read_text("utf-8") if before else ""
        assert not before or text.count(before) == 1, f"{name} has not once:\n{before}"
        assert bool(before) == file.exists(), name
        file.write_text(text.replace(before, after) if before else after, "utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository as it is now."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().splitlines():
        if (source := ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_every_kind_of_part_has_a_recipe() -> None:
    parts = ["key", "metric", "family", "source", "optimizer", "schedule", "parallelism", "command"]
    assert [*RECIPES] == parts
    assert PAGE.count("```diff") == len(parts)


def test_the_edits_fit_the_code(tmp_path: Path) -> None:
    for name, (edits, _) in RECIPES.items():
        for file in re.findall(r"^\+\+\+ (.*)", edits, re.MULTILINE):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / file).exists():
                shutil.copy(ROOT / file, tmp_path / name / file)
        edit(tmp_path / name, edits)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_edits_of_a_recipe_pass_its_tests(name: str, copy: Path) -> None:
    edits, commands = RECIPES[name]
    edit(copy, edits)
    if name == "family":  # its file is on the page of extensions
        (copy / "meshwright/models/families/exaone4.py").write_text(example("exaone4"), "utf-8")
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=copy,
        env=environment(PYTHONPATH=copy),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
