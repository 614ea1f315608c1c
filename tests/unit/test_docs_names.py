"""Files and names that the docs speak of are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = (ROOT / "docs/glossary.md").read_text("utf-8")


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


def test_the_glossarys_names_exist() -> None:
    names = re.findall(r"\| `([a-z_.]+)\.([A-Z]\w+)` \|", GLOSSARY)
    assert len(names) > 20
    for module, name in names:
        path = PACKAGE / module.replace(".", "/")
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        assert re.search(rf"^(class )?{name}\b", file.read_text("utf-8"), re.M), f"{module}.{name}"
