"""Private names of torch (and of Python) that the package uses: each new one is a decision, and
raises the number.

Each is behind one function or one import, with a comment on its failure if torch removes it. The
`_scaled_dot_product_...` are operators, and have no other names.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import meshwright

PACKAGE = Path(meshwright.__file__).parent


MOST_NAMES = 61

OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")  # public, documented by Python


def is_private(name: str) -> bool:
    parts = [part for part in name.split(".") if part not in OF_NAMED_TUPLES]
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def own_names(trees: list[ast.Module]) -> Iterator[str]:
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def used_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch"))


def test_private_names_become_no_more() -> None:
    files = {file: ast.parse(file.read_text("utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    own = {*own_names([*files.values()])}
    found = {}
    for file, tree in files.items():
        if names := {name for name in used_names(tree) if is_private(name) and name not in own}:
            found[file.relative_to(PACKAGE).as_posix()] = names
    assert sum(map(len, found.values())) <= MOST_NAMES, found
