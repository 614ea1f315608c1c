"""The pages of docs/ lead somewhere, on GitHub and as a site, and name what is there.

`mkdocs build --strict` needs the extra `docs`; these tests do not.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
OUTSIDE += [ROOT / "benchmarks/README.md", ROOT / "tests/campaigns/README.md"]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of Markdown, without addresses of the web."""
    text = CODE.sub("code", page.read_text("utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text)
    return [a or b for a, b in found if not (a or b).startswith("http")]


def slugs(page: Path) -> set[str]:
    """Anchors of headings, where GitHub and mkdocs agree on them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    on_github = [title.replace(" ", "-") for title in plain]
    on_site = [re.sub(r"[-\s]+", "-", title) for title in plain]
    return {a for a, b in zip(on_github, on_site, strict=True) if a == b}


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link
        if page in PAGES:  # a site has no other files
            assert DOCS in target.parents, link
            assert target.is_file(), link


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.name)
def test_no_pattern_is_read_as_italics(page: Path) -> None:
    """As the stars of "a.*", "b.*" are."""
    for line in CODE.sub("", page.read_text("utf-8")).splitlines():
        text = re.sub(r"^\s*\* |\*\*", "", line)
        assert not re.search(r"\S\*\W.*\*", text), line


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.name)
def test_lines_of_code_fit_the_column_of_the_site(page: Path) -> None:
    """Measured in Chromium at 1280 px: 74 characters and the copy button fill it."""
    blocks = re.findall(r"^```.*?^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > 74]
    assert not wide, wide


def _files(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        file for part in (nav.values() if isinstance(nav, dict) else nav) for file in _files(part)
    ]


def test_every_page_is_in_the_site_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert config["docs_dir"] == "docs"
    assert sorted(_files(config["nav"])) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_the_page_of_tasks_has_all_of_them() -> None:
    """On GitHub it stands in the place of the site's navigation."""
    named = {link.partition("#")[0] for link in links(DOCS / "README.md") if ".md" in link}
    assert named == {page.name for page in PAGES if page.parent == DOCS} - {"README.md"}


def test_the_public_types_are_those_that_the_pages_import() -> None:
    text = (DOCS / "extending.md").read_text("utf-8")
    rows = re.findall(r"^\| `(meshwright[\w.]+)` \| (.*) \|$", text, re.MULTILINE)
    public = {(module, name) for module, names in rows for name in re.findall(r"\w+", names)}
    for module, name in public:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright.")
        for alias in node.names
    }
    assert imported <= public


TROUBLES = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
QUOTES = [
    quote
    for row in re.findall(r"^\| (`.*?) \|", TROUBLES, re.MULTILINE)
    for quote in re.findall(r"`([^`]+)`", row)
]


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE[:2], *OUTSIDE[3:]], ids=lambda page: page.name)
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
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "meshwright").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # strings over several lines
    assert len(QUOTES) > 15
    for quote in QUOTES:
        for part in re.split(r"\.\.\.|\bN\b", quote):
            assert part.strip() in joined, quote


def test_every_benchmark_finds_what_it_imports(monkeypatch) -> None:
    """One that crashes later shows only when it is run: some take minutes."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as a script that imports another has it
    for path in (ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


SLOW_PYTHON = f"""#!/usr/bin/env bash
case "$*" in -m\\ pytest*|benchmarks/*|*collect_env*) echo began; sleep 60;; esac
exec {sys.executable} "$@"
"""


def test_the_gpu_script_ends_in_time(tmp_path) -> None:
    """Each part takes at most half of the time that is left; what didn't begin is named."""
    (tmp_path / "python").write_text(SLOW_PYTHON)
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "VIRTUAL_ENV": sys.prefix}
    result = subprocess.run(
        [ROOT / "scripts/gpu_smoke.sh", "--minutes", "0.07", tmp_path / "out"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert re.search(r"^== one_gpu: stopped after \d s$", result.stdout, re.MULTILINE)
    assert "\n== versions: no time is left\n" in result.stdout
    assert (tmp_path / "out/one_gpu.txt").read_text() == "began\n"


@pytest.mark.parametrize("words", [[], ["soon"], ["0"], ["-3"]], ids=str)
def test_minutes_of_the_gpu_script_are_a_positive_number(words, tmp_path) -> None:
    command = [ROOT / "scripts/gpu_smoke.sh", "--minutes", *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "must be a positive number: write --minutes 8\n" in result.stderr


def test_the_docs_state_the_limits_of_the_gpu_script() -> None:
    script = (ROOT / "scripts/gpu_smoke.sh").read_text()
    seconds = sum(map(int, re.findall(r"^part \w+ (\d+) ", script, re.MULTILINE)))
    page = (ROOT / "docs/clusters.md").read_text()
    stated = re.search(r"# (\d+) minutes at most.*\nscripts/gpu_smoke.sh", page)
    assert stated is not None
    assert int(stated[1]) == seconds / 60
