"""Print docs/images/house.svg: the folders on their floors, the ways of a batch and a parameter.

python -m scripts.draw_house > docs/images/house.svg
"""

import ast
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from textwrap import wrap

PACKAGE = Path(__file__).parents[1] / "meshwright"
WIDTH, GAP, MARGIN, LINE = 330, 30, 20, 17
WAYS = {  # files that it passes, in order
    ("batch", "#1f6feb"): (
        *("datasets/rows.py", "datasets/stream.py", "datasets/loader.py"),
        *("train/trainer.py", "parallelisms/context_parallel.py", "models/decoder.py"),
        *("models/loss.py", "train/optim/optimizers.py", "metrics/reporter.py"),
    ),
    ("parameter", "#bc4c00"): (
        *("models/table.py", "train/build.py", "parallelisms/parallelize.py"),
        *("parallelisms/initialize.py", "train/optim/optimizers.py", "checkpoint/manager.py"),
    ),
}
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@cache
def imports(room: str) -> tuple[str, ...]:
    """Return the other rooms that files of `room` import."""
    found = set()
    for file in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright."):
                found.add(str(node.module).split(".")[1])
    return tuple(sorted(found - {room}))


def floor_of(room: str) -> int:
    """Return 1 plus the highest floor among the rooms that it imports."""
    return 1 + max(map(floor_of, imports(room)), default=0)


def purpose_of(room: str) -> list[str]:
    """Return the first sentence of the folder's docstring, in lines."""
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))) or ""
    return wrap(text.replace("\n", " ").split(". ")[0].rstrip(".").replace("`", ""), 48)


def steps_in(room: str) -> list[tuple[str, int, str]]:
    """Return color, number and file of each step that a way takes in `room`."""
    return [
        (color, number, file.partition("/")[2])
        for (_, color), files in WAYS.items()
        for number, file in enumerate(files, 1)
        if file.startswith(f"{room}/")
    ]


def text(x: int, y: int, words: str, style: str = "") -> str:
    """Return an element with `words`."""
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def box(room: str, x: int, y: int, height: int) -> Iterator[str]:
    """Elements of a room; its upper left corner is at `x`, `y`."""
    yield (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="6" '
        'fill="#f6f8fa" stroke="#8c959f"/>'
    )
    yield text(x + 12, y + 22, room, 'font-weight="bold" font-size="15"')
    y += 22
    for line in purpose_of(room):
        y += LINE
        yield text(x + 12, y, line)
    y += LINE
    yield text(x + 12, y, f"imports {', '.join(imports(room)) or 'none'}", 'fill="#57606a"')
    for color, number, file in steps_in(room):
        y += LINE + 3
        yield f'<circle cx="{x + 21}" cy="{y - 4}" r="9" fill="{color}"/>'
        yield text(x + 21, y, str(number), 'fill="white" text-anchor="middle"')
        yield text(x + 38, y, file, f'fill="{color}"')


def draw() -> str:
    """Return the drawing, the highest floor on top."""
    floors = sorted({floor_of(room) for room in ROOMS}, reverse=True)
    rows = [[room for room in ROOMS if floor_of(room) == floor] for floor in floors]
    width = 2 * MARGIN + max(map(len, rows)) * (WIDTH + GAP) - GAP
    y, parts = MARGIN + 12, []
    for (name, color), _ in WAYS.items():
        words = f"The numbers in this color: the way of a {name}"
        parts.append(text(MARGIN, y, words, f'fill="{color}" font-weight="bold"'))
        y += LINE + 3
    for row in rows:
        height = max(
            50 + LINE * len(purpose_of(room)) + (LINE + 3) * len(steps_in(room)) for room in row
        )
        for column, room in enumerate(row):
            parts += box(room, MARGIN + column * (WIDTH + GAP), y, height)
        y += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])


if __name__ == "__main__":
    print(draw())
