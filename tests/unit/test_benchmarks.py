"""Every benchmark's imports; the benchmarks that pages name; what benchmarks/compare.py calls
worse."""

import copy
import importlib
import re
from pathlib import Path

import pytest

from benchmarks import compare

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]
PAGES.remove(ROOT / "CHANGELOG.md")  # which tells of scripts that are gone


def test_every_benchmark_finds_what_it_imports(monkeypatch) -> None:
    """One that crashes later shows only when it is run: some take minutes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as a script that imports another has it
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


def test_every_benchmark_that_a_page_names_is_there() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    names = {*re.findall(r"benchmarks[/.](\w+)\b(?:\.py)?", text)}
    names |= {*re.findall(r"`(\w+)\.py`", (ROOT / "benchmarks/README.md").read_text())}
    there = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert names <= there


ROW = {
    "contender": "ours",
    "tokens_per_s": 1000.0,
    "spread": [960.0, 1040.0],
    "ratio_to_bare": 1.1,
    "peak_gib": 2.0,
    "first_step_s": 5.0,
}
OLD = {
    "machine": {"device": "a CPU", "cores": "2"},
    "results": [{"mode": "eager", "workload": {"dim": 512}, "rows": [ROW]}],
}


def after(**changes: object) -> dict:
    new = copy.deepcopy(OLD)
    new["results"][0]["rows"][0] |= changes
    return new


def test_a_slowdown_beyond_noise_is_named() -> None:
    assert not [*compare.worse(OLD, after(ratio_to_bare=1.06))]  # rounds differ by 4 %
    (text,) = compare.worse(OLD, after(ratio_to_bare=1.04))
    assert text == "eager, ours: ratio_to_bare 1.1 -> 1.04 (noise 4%)"
    assert not [*compare.worse(OLD, after(ratio_to_bare=1.04, spread=[900.0, 1100.0]))]


@pytest.mark.parametrize("figure", ["peak_gib", "first_step_s"])
def test_memory_and_start_count_on_the_same_machine_alone(figure: str) -> None:
    new = after(**{figure: 1.1 * ROW[figure]})
    assert len([*compare.worse(OLD, new)]) == 1
    new["machine"]["device"] = "another"
    assert not [*compare.worse(OLD, new)]


def test_only_the_same_workload_is_compared() -> None:
    new = after(ratio_to_bare=0.5)
    new["results"][0]["workload"]["dim"] = 1024
    assert not [*compare.worse(OLD, new)]
