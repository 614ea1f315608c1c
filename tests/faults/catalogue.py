"""All faults, by name: `catalogue.txt`, which says how it is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault of another framework, at the place where we would make it."""

    name: str
    thread: str
    """Where it was published, or "seen here": of a known class, but no thread was read."""
    patches: dict[str, list[tuple[str, str]]]
    """For each file of the package: texts that it has once, and those in their place."""
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
    case: str = ""
    """Name of the case, of those that `prove` has by itself; "": made of the fields before."""
    finder: str = "prove"
    """What must find it: the command `prove`, `check` or `export`, or a test by its pytest ID.
    "reference" is the part of `prove` that compares its one process with plain PyTorch, and
    "properties" is what measures causal, reach and isolation on it."""

    @property
    def test_file(self) -> str:
        """The file of the test that must find it, from the root; empty if a command does."""
        file, separator, _ = self.finder.partition("::")
        return file if separator else ""


def parse(block: str) -> Fault:
    """Read the lines of one fault."""
    heads, patches = list[str](), dict[str, list[tuple[list[str], list[str]]]]()
    for sign, line in ((line[0], line[1:]) for line in block.splitlines()):
        if sign == "@" and line.startswith("@"):
            patches[line[1:].strip()] = []
            continue
        if sign == "@":
            heads.append(line.strip())
            continue
        if not patches:
            patches[heads[1].split(" | ")[0]] = []
        patch = [*patches.values()][-1]
        if sign == "-" and (not patch or patch[-1][1]):
            patch.append(([], []))
        patch[-1][sign == "+"].append(line)
    (name, _, thread), (_, where, named) = heads[0].partition(": "), heads[1].split(" | ")
    mesh, dashes, words = where.partition("--")
    axes = (axis.split() for axis in mesh.split(",") if axis.strip())
    texts = {
        file: [("\n".join(old) + "\n" * (not new), "\n".join(new)) for old, new in patch]
        for file, patch in patches.items()
    }
    return Fault(
        name,
        thread,
        texts,
        {axis: int(degree) for axis, degree in axes},
        named,
        (dashes + words).split(),
        **(json.loads(heads[2]) if len(heads) > 2 else {}),
    )


BLOCKS = Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n")
FAULTS = tuple(parse(block) for block in BLOCKS if block.startswith("@"))
