"""Every benchmark's imports, and the benchmarks that pages name; they run in integration tests."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
PAGES.remove(ROOT / "CHANGELOG.md")  # which tells of scripts that are gone


def test_every_benchmark_finds_what_it_imports(monkeypatch) -> None:
    """One that crashes later shows only when it is run: some take minutes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as a script that imports another has it
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


def test_every_benchmark_that_a_page_names_is_there() -> None:
    """But for those named with the last commit that has them."""
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    names = {*re.findall(r"(?<![\w:])benchmarks[/.](\w+)\b(?:\.py)?", text)}
    there = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert names <= there
