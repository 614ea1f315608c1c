"""Print how many files and lines the package has, and which parts are larger than most.

    python -m scripts.sizes

No test fails because of a size: whether a large part reads well is for its review.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "meshwright"

LONG_FILE, FULL_FOLDER, LONG_FUNCTION = 400, 15, 79
"""Lines of a file, files of a folder and lines of a function. Larger ones are named."""

texts = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
lines = {name: len(text.splitlines()) for name, text in texts.items()}
folders: dict[str, int] = {}
functions: dict[str, int] = {}
for name, text in texts.items():
    folder = str(Path(name).parent)
    folders[folder] = folders.get(folder, 0) + (Path(name).stem != "__init__")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            functions[f"{name}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1

print(f"{len(texts)} files, {sum(lines.values()):,} lines")
for what, sizes, most in (
    (f"files of more than {LONG_FILE} lines", lines, LONG_FILE),
    (f"folders of more than {FULL_FOLDER} files", folders, FULL_FOLDER),
    (f"functions of more than {LONG_FUNCTION} lines", functions, LONG_FUNCTION),
):
    large = (f"{name} ({size})" for name, size in sorted(sizes.items()) if size > most)
    print(f"{what}: {', '.join(large) or 'none'}")
