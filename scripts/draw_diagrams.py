"""Print docs/images/job.svg, the parts of a job, or pieces.svg, who holds which piece of a matrix.

python -m scripts.draw_diagrams job > docs/images/job.svg
python -m scripts.draw_diagrams pieces > docs/images/pieces.svg
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.svg import arrow, box, picture, text

PACKAGE = Path(__file__).parents[1] / "meshwright"
WIDTH, HEIGHT, GAP = 200, 58, 34
JOB = {  # column, row: title, about it, its file
    (0, 0): ("config", "TOML and command line", "config/loader.py"),
    (1, 0): ("launcher", "starts and watches the ranks", "launch/watch.py"),
    (2, 0): ("resolve", "all ranks agree on the job", "train/resolve.py"),
    (3, 0): ("set-up", "the mesh, then these parts", "train/set_up.py"),
    (0, 1): ("texts", "files, the hub, tokens", "datasets/sources.py"),
    (1, 1): ("tokens", "once, in a cache; or a stream", "datasets/encoding.py"),
    (2, 1): ("samples", "sample i, on any mesh", "datasets/stream.py"),
    (3, 1): ("batch of a rank", "its slots of the global batch", "datasets/loader.py"),
    (0, 2): ("family", "a table of parameters", "models/table.py"),
    (1, 2): ("model", "one device, without memory", "models/decoder.py"),
    (2, 2): ("parallelisms", "TP, CP, AC, compile, FSDP2", "parallelisms/parallelize.py"),
    (3, 2): ("values", "of a counter or a checkpoint", "parallelisms/initialize.py"),
    (0, 3): ("metrics", "console, files, report", "metrics/reporter.py"),
    (1, 3): ("checkpoints", "any mesh; Hugging Face", "checkpoint/manager.py"),
    (2, 3): ("validation", "the same samples each time", "train/validation.py"),
    (3, 3): ("step", "forward, backward, update", "train/trainer.py"),
}
COLORS = ("#2f81f7", "#e0823d", "#2da44e", "#bf4bce")
"""Of ranks 0 to 3."""
CELL, SIZE = 22, 8


def job() -> str:
    """Return the drawing of the parts: data and model meet in the step, from left to right."""

    def left(column: int) -> float:
        return 12 + column * (WIDTH + GAP)

    def top(row: int) -> float:
        return 12 + row * (HEIGHT + GAP)

    parts = []
    for (column, row), (title, about, file) in JOB.items():
        if not (PACKAGE / file).is_file():
            raise FileNotFoundError(file)
        x, y = left(column), top(row)
        parts += [box(x, y, WIDTH, HEIGHT), text(x + 10, y + 19, title, "title")]
        parts += [text(x + 10, y + 35, about), text(x + 10, y + 51, file, "soft")]
        middle = y + HEIGHT / 2
        if column < 3:
            ends = (x + WIDTH, middle), (x + WIDTH + GAP, middle)
            parts.append(arrow(*(ends if row < 3 else ends[::-1])))
    side = left(3) + WIDTH + 16
    for row in (0, 1, 2):  # all of them come to the step
        ways = [(y := top(row) + HEIGHT / 2), y, top(3) + HEIGHT / 2, top(3) + HEIGHT / 2]
        parts.append(arrow(*zip([side - 16, side, side, side - 16], ways, strict=True)))
    return picture(side + 8, top(3) + HEIGHT + 12, parts)


def owner(matrix: str, row: int, column: int) -> int:
    """Return the rank of dp_shard 2 x tp 2 that keeps an element; rank = 2 dp + tp."""
    half = SIZE // 2
    if matrix == "rows":  # tp cuts rows, and FSDP2 each of its parts again
        return 2 * (row % half // (half // 2)) + row // half
    return 2 * (row // half) + column // half  # tp cuts columns, FSDP2 rows


def pieces() -> str:
    """Return the drawing of weights on four ranks, and of the parts that a layer computes with."""
    titles = {
        "rows": ("wq, wk, wv, w1, w3", "TP cuts rows, FSDP2 cuts these rows again"),
        "columns": ("wo, w2", "TP cuts columns, FSDP2 cuts rows"),
    }
    parts = [text(12, 18, "A matrix on 4 ranks: dp_shard 2 x tp 2", "title")]
    for rank, color in enumerate(COLORS):
        x = 12 + 150 * rank
        parts.append(f'<rect x="{x}" y="32" width="14" height="14" rx="2" fill="{color}"/>')
        parts.append(text(x + 20, 44, f"rank {rank}: dp {rank // 2}, tp {rank % 2}"))
    for place, (matrix, (title, about)) in enumerate(titles.items()):
        x, y = 12 + 410 * place, 76
        parts += [text(x, y, title, "title"), text(x, y + 17, about, "soft")]
        parts += _matrix(x, y + 30, "kept, with Adam's state", matrix, None)
        parts += _matrix(x + SIZE * CELL + 14, y + 30, "gathered by ranks 0 and 2", matrix, 0)
    return picture(800, 76 + 30 + SIZE * CELL + 26, parts)


def _matrix(x: float, y: float, caption: str, matrix: str, tp: int | None) -> Iterator[str]:
    """Elements of a matrix; only the part of a tp rank, if that is given."""
    for row in range(SIZE):
        for column in range(SIZE):
            rank = owner(matrix, row, column)
            shade = f'fill="{COLORS[rank]}"' if tp in (None, rank % 2) else 'fill="#8883"'
            place = f'x="{x + column * CELL}" y="{y + row * CELL}"'
            yield f'<rect {place} width="{CELL - 2}" height="{CELL - 2}" rx="2" {shade}/>'
    yield text(x, y + SIZE * CELL + 14, caption, "soft")


if __name__ == "__main__":
    print({"job": job, "pieces": pieces}[sys.argv[1]]())
