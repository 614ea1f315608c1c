"""Files and names that the docs speak of are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_files_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./]+\.py)`", page.read_text("utf-8")))
    there = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("meshwright", "tests", "benchmarks", "scripts", "train_configs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    there += [f"/{path.name}" for path in ROOT.glob("*.py")]
    for name in named:
        is_example = "NAME" in name or name.startswith(("path/", "my_"))
        assert is_example or any(path.endswith(f"/{name}") for path in there), name
