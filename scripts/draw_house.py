"""Print docs/images/house.svg: the folders on their floors, the ways of a batch and a parameter.

python -m scripts.draw_house > docs/images/house.svg
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import wrap

from scripts.svg import box, picture, text

PACKAGE = Path(__file__).parents[1] / "meshwright"
WIDTH, GAP, MARGIN, LINE = 940, 16, 12, 17
WAYS = {  # files that it passes, in order
    ("batch", "blue"): (
        *("datasets/rows.py", "datasets/stream.py", "datasets/loader.py"),
        *("train/trainer.py", "parallelisms/sequence_parts.py", "models/decoder.py"),
        *("models/loss.py", "train/optim/update.py", "metrics/reporter.py"),
    ),
    ("parameter", "brown"): (
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
    return wrap(text.replace("\n", " ").split(". ")[0].rstrip(".").replace("`", ""), 46)


def steps_in(room: str) -> list[tuple[str, int, str]]:
    """Return color, number and file of each step that a way takes in `room`."""
    return [
        (color, number, file.partition("/")[2])
        for (_, color), files in WAYS.items()
        for number, file in enumerate(files, 1)
        if file.startswith(f"{room}/")
    ]


def room_of(room: str, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Elements of a room; its upper left corner is at `x`, `y`."""
    yield box(x, y, width, height)
    y += 22
    yield text(x + 12, y, room, "title")
    for line in purpose_of(room):
        y += LINE
        yield text(x + 12, y, line)
    y += LINE
    yield text(x + 12, y, f"imports {', '.join(imports(room)) or 'none'}", "soft")
    for color, number, file in steps_in(room):
        y += LINE + 3
        yield f'<circle cx="{x + 21:g}" cy="{y - 4:g}" r="9" class="{color}"/>'
        yield text(x + 21, y, str(number), "number", centered=True)
        yield text(x + 38, y, file, color)


def draw() -> str:
    """Return the drawing, the highest floor on top."""
    floors = sorted({floor_of(room) for room in ROOMS}, reverse=True)
    rows = [[room for room in ROOMS if floor_of(room) == floor] for floor in floors]
    y, parts = MARGIN + 12, []
    for (name, color), _ in WAYS.items():
        parts.append(text(MARGIN, y, f"The numbers in this color: the way of a {name}", color))
        y += LINE + 3
    for row in rows:
        height = max(
            34 + LINE * (1 + len(purpose_of(room))) + (LINE + 3) * len(steps_in(room))
            for room in row
        )
        width = (WIDTH + GAP) / len(row) - GAP
        for column, room in enumerate(row):
            parts += room_of(room, MARGIN + column * (width + GAP), y, width, height)
        y += height + GAP
    return picture(WIDTH + 2 * MARGIN, y, parts)


if __name__ == "__main__":
    print(draw())
