"""All faults, by name: `catalogue.txt`, which says how it is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Fault:
    """A fault of another framework, at the place where we would make it."""

    name: str
    thread: str
    """Where it was published; empty: of a known class, but no thread was read."""
    file: str
    """In the package."""
    patch: list[tuple[str, str]]
    """Texts that the file has once, and those in their place."""
    mesh: dict[str, int]
    """Of the shortest case of `prove` that must find it."""
    named: str
    """Part of a line of the verdict that names the quantity, or the parameter, that is wrong."""
    words: list[str] = field(default_factory=list)
    """Of the config, in addition to the debug model's."""
    num_microbatches: int = 0
    kind: Any = "fp32"
    n_layers: int = 3
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of the case, as `build_case` takes them."""
    finder: Literal["prove", "export"] = "prove"
    """The command that must find it."""


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
