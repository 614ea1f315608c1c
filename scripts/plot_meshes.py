"""Train one TOML on six meshes of this machine's CPU, and draw their losses and differences.

python -m scripts.plot_meshes > docs/images/meshes.svg        # minutes
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.svg import picture, text

STEPS = 40
MESHES = {
    "1 process": {},
    "FSDP 2": {"data_parallel_shard_degree": 2},
    "TP 2": {"tensor_parallel_degree": 2},
    "CP 2": {"context_parallel_degree": 2},
    "PP 2": {"pipeline_parallel_degree": 2},
    "FSDP 2 x TP 2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
}
"""Degrees by the name in the picture; the first is the reference."""
COLOURS = ("#8c959f", "#2f81f7", "#e0823d", "#2da44e", "#bf4bce", "#e5534b")
WIDTH, LEFT, RIGHT = 600, 72, 16
TOP, UPPER, GAP, LOWER = 32, 230, 50, 150
EQUAL, LARGEST = -8, -2
"""Powers of ten at the ends of the lower axis."""
FONT = 18
"""Readable on a phone, where the drawing is about 0.6 times as wide."""


def losses(name: str, folder: Path) -> list[float]:
    """Train the debug model on a mesh and return the loss of each step."""
    print(f"training on {name}", file=sys.stderr)
    degrees = MESHES[name]
    options = {
        "job.dump_folder": folder / name.replace(" ", "_"),
        "training.steps": STEPS,
        "lr_scheduler.warmup_steps": 10,
        "metrics.log_freq": 1,
        "checkpoint.enable": "false",
        "validation.enable": "false",
        **{f"parallelism.{key}": value for key, value in degrees.items()},
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "meshwright", "train", "debug_model"]
    ranks = str(math.prod(degrees.values()))
    subprocess.run([*command, "--ngpu", ranks, *words], check=True, stdout=subprocess.DEVNULL)
    text = (Path(options["job.dump_folder"]) / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line)["loss/train"] for line in text.splitlines()]


def line(values: Sequence[float], low: float, high: float, top: float, height: float) -> str:
    """Points of a polyline over all steps; values outside of the range stay at its edge."""
    step = (WIDTH - LEFT - RIGHT) / (STEPS - 1)
    heights = ((high - min(max(value, low), high)) / (high - low) for value in values)
    return " ".join(f"{LEFT + i * step:.1f},{top + y * height:.1f}" for i, y in enumerate(heights))


def drawing(runs: dict[str, list[float]]) -> Iterator[str]:
    """Elements of an SVG: losses above, relative differences from one process below."""
    (first, reference), *others = runs.items()
    low, high = math.floor(min(reference)), math.ceil(max(reference))
    below = TOP + UPPER + GAP
    yield f'<g font-size="{FONT}">'
    yield text(LEFT, 16, "loss of one TOML on six meshes (nats per token)")
    for value in range(low, high + 1):
        yield from rule(TOP + (high - value) / (high - low) * UPPER, str(value))
    for i, (name, values) in enumerate(runs.items()):
        # one wide curve, and the others as dashes side by side on it
        dashes = f'stroke-width="3" stroke-dasharray="9 {9 * (len(others) - 1)}"'
        style = f'{dashes} stroke-dashoffset="{-9 * i}"' if i else 'stroke-width="7" opacity="0.6"'
        points = line(values, low, high, TOP, UPPER)
        yield f'<polyline stroke="{COLOURS[i]}" {style} points="{points}"/>'
        y = TOP + 18 + 22 * i  # of its name: the curves leave the upper right free
        key = f'x="{WIDTH - 190}" y="{y - 11}" width="14" height="10"'
        yield f'<rect {key} fill="{COLOURS[i]}"/>'
        yield text(WIDTH - 168, y, name)
    yield text(LEFT, below - 12, f"relative difference from {first}")
    for power in range(EQUAL, LARGEST + 1, 2):
        y = below + (LARGEST - power) / (LARGEST - EQUAL) * LOWER
        yield from rule(y, f"1e{power}" if power > EQUAL else "equal")
    for i, (_, values) in enumerate(others, 1):
        differences = [
            math.log10(max(abs(mine - one) / one, 10**EQUAL))
            for mine, one in zip(values, reference, strict=True)
        ]
        points = line(differences, EQUAL, LARGEST, below, LOWER)
        yield f'<polyline stroke="{COLOURS[i]}" stroke-width="1.5" points="{points}"/>'
    yield text(LEFT, below + LOWER + 24, "step 1")
    yield text(WIDTH - RIGHT - 10, below + LOWER + 24, str(STEPS), centered=True)
    yield "</g>"


def rule(y: float, label: str) -> Iterator[str]:
    """A line of the grid, with its value."""
    yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield f'<text x="{LEFT - 8}" y="{y + 6:.1f}" text-anchor="end">{label}</text>'


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: losses(name, Path(folder)) for name in MESHES}
    largest = max(
        abs(mine - one) / one
        for values in runs.values()
        for mine, one in zip(values, runs["1 process"], strict=True)
    )
    print(f"largest relative difference: {largest:.1e}", file=sys.stderr)
    print(picture(WIDTH, TOP + UPPER + GAP + LOWER + 34, drawing(runs)))
