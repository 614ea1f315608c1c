"""Imports point down the floors of the house; see docs/how_it_works.md."""

import ast
from pathlib import Path

import pytest

import meshwright
from meshwright.config.job_config import JobConfig
from meshwright.models.families import FIRST, MODELS

PACKAGE = Path(meshwright.__file__).parent
FLOORS = (  # a part may import parts of lower floors only; a new part must be given a floor
    "system models",
    "config",
    "parallelisms metrics datasets",
    "checkpoint launch",
    "train",
    "commands",
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts.split()}
NEEDS_NO_TORCH = (
    *("train/preflight.py", "commands/check.py", "commands/checkpoint.py", "commands/config.py"),
    *("commands/tokenize_data.py", "commands/train.py", "commands/report.py"),
)


def imports(file: Path) -> set[str]:
    """Modules that `file` imports; an import inside a function counts too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: f.name)
def test_imports_point_down(file: Path) -> None:
    here = file.relative_to(PACKAGE).with_suffix("").parts[0]
    if here == "__init__":
        return
    for module in imports(file):
        parts = module.split(".")
        there = parts[1] if parts[0] == "meshwright" and len(parts) > 1 else ""
        is_part = (PACKAGE / there).is_dir() or (PACKAGE / f"{there}.py").exists()
        if there and is_part:
            assert there == here or FLOOR[there] < FLOOR[here], f"{here} may not import {there}"


@pytest.mark.parametrize("start", NEEDS_NO_TORCH)
def test_checking_a_config_does_not_import_torch(start: str) -> None:
    seen, todo = set(), [PACKAGE / start]
    while todo:
        file = todo.pop()
        seen.add(file)
        for module in imports(file):
            assert module.split(".")[0] != "torch", file
            parts = module.split(".")
            if parts[0] == "meshwright":
                path = PACKAGE.joinpath(*parts[1:])
                candidates = [path.with_suffix(".py"), path / "__init__.py"]
                todo += [c for c in candidates if c.exists() and c not in seen]
    assert len(seen) > 3


def test_a_family_that_is_not_named_is_the_first() -> None:
    assert next(iter(MODELS)) == FIRST == JobConfig().model.name == "llama"
