"""Files, names, benchmarks and messages that the docs speak of are there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TROUBLES = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
QUOTES = [
    quote
    for row in re.findall(r"^\| (`.*?) \|", TROUBLES, re.MULTILINE)
    for quote in re.findall(r"`([^`]+)`", row)
]


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


def test_the_console_says_the_messages_of_troubleshooting() -> None:
    """Dots, and N for a number, stand for a part that varies."""
    code = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # strings over several lines
    assert len(QUOTES) > 15
    for quote in QUOTES:
        for part in re.split(r"\.\.\.|\bN\b", quote):
            assert part.strip() in joined, quote


NAMING = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
NAMING.remove(ROOT / "CHANGELOG.md")  # which tells of scripts that are gone


def test_every_benchmark_finds_what_it_imports(monkeypatch) -> None:
    """One that crashes later shows only when it is run: some take minutes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as a script that imports another has it
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


def test_every_benchmark_that_a_page_names_is_there() -> None:
    """But for those named with the last commit that has them."""
    text = "\n".join(page.read_text("utf-8") for page in NAMING)
    names = {*re.findall(r"(?<![\w:])benchmarks[/.](\w+)\b(?:\.py)?", text)}
    there = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert names <= there
