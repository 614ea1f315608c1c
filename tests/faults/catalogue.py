"""All faults, by name: `catalogue.txt`, which says how it is written."""

import json
from pathlib import Path

from tests.faults.fault import Fault


def parse(block: str) -> Fault:
    """Read the lines of one fault."""
    heads, patch = list[str](), list[tuple[list[str], list[str]]]()
    for sign, line in ((line[0], line[1:]) for line in block.splitlines()):
        if sign == "@":
            heads.append(line.strip())
            continue
        if sign == "-" and (not patch or patch[-1][1]):
            patch.append(([], []))
        patch[-1][sign == "+"].append(line)
    (name, _, thread), (file, where, named) = heads[0].partition(": "), heads[1].split(" | ")
    mesh, dashes, words = where.partition("--")
    axes = (axis.split() for axis in mesh.split(",") if axis.strip())
    return Fault(
        name,
        thread,
        file,
        [("\n".join(old) + "\n" * (not new), "\n".join(new)) for old, new in patch],
        {axis: int(degree) for axis, degree in axes},
        named,
        (dashes + words).split(),
        **(json.loads(heads[2]) if len(heads) > 2 else {}),
    )


BLOCKS = Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n")
FAULTS = tuple(parse(block) for block in BLOCKS if block.startswith("@"))
