"""The project's English: nouns, not "what"."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_PER_1000_WORDS = 1.0


def prose_of(file: Path) -> Iterator[str]:
    """Docstrings and comments of a module; the whole of another file."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def messages_of(file: Path) -> Iterator[str]:
    """Strings of several words that are no docstrings: errors, lines of the log, help."""
    tree = ast.parse(file.read_text("utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in alone and " " in str(node.value):
            yield str(node.value)


@pytest.mark.parametrize(
    ("pattern", "prose_of"),
    [
        ("meshwright/**/*.py", prose_of),
        ("meshwright/**/*.py", messages_of),
        ("docs/**/*.md", prose_of),
        ("*.md", prose_of),
    ],
)
def test_what_is_rare(pattern: str, prose_of: Callable[[Path], Iterator[str]]) -> None:
    words, found = 0, dict[str, int]()
    for file in ROOT.glob(pattern):
        prose = " ".join(prose_of(file))
        words += len(prose.split())
        if count := len(re.findall(r"\bwhat\b", prose, re.IGNORECASE)):
            found[str(file.relative_to(ROOT))] = count
    assert 1000 * sum(found.values()) <= MOST_PER_1000_WORDS * words, found
