"""Between which checkpoints two runs part, and which element of which tensor is off by itself."""

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from meshwright.checkpoint import listing
from meshwright.checkpoint.index import Chunk
from meshwright.checkpoint.reader import CheckpointWeights, compare
from meshwright.checkpoint.state import MODEL, OPTIMIZER, RNG
from meshwright.system.files import NamedPath

WEIGHT, GRADIENT, NORM = "weight", "gradient", "sum of squares of all gradients"
"""Values next to the keys of the optimizer's state."""

STANDS_OUT = 10.0
"""Times the second largest difference of a tensor from which the largest stands by itself: rounding
spreads over many elements."""

LEAST_SIZE = 1e-5
"""Of what stands out, over the root mean square of the tensor: in a small tensor, rounding may
change a single element by an ulp."""

MOST_SUSPECTS = 24
"""Weights whose bits are tried."""

LARGE = 1e100
"""In the place of a difference that isn't finite."""

WRITER = re.compile(r"__(\d+)_\d+\.distcp")
"""In the name of a file of a checkpoint: the rank that wrote it."""


@dataclass(frozen=True)
class Place:
    """An element of a tensor of a run."""

    parameter: str
    value: str
    """Of the parameter: `WEIGHT`, `GRADIENT` or a key of the optimizer's state; or `NORM`."""
    index: tuple[int, ...]
    rank: int
    """That holds it."""
    has_replicas: bool
    """Other ranks hold it too."""

    @property
    def element(self) -> tuple[object, ...]:
        """The element, whichever of its values is meant."""
        return self.parameter, self.index, self.rank

    @property
    def words(self) -> str:
        """The element, and who holds it, behind the words of a value."""
        replicas = " or a replica of its shard" if self.has_replicas else ""
        index = f" of {self.parameter}, element ({', '.join(map(str, self.index))}),"
        return f"{index if self.parameter else ''} on rank {self.rank}{replicas}"


@dataclass(frozen=True)
class Element:
    """The element of a tensor that differs most between two checkpoints."""

    place: Place
    distance: float
    """By how much it differs."""
    size: float
    """The same, over the root mean square of the tensor."""
    times: float
    """Of the next difference in the tensor; infinite: no other element differs."""

    @property
    def how_far(self) -> str:
        """How much it stands out."""
        if math.isinf(self.times):
            return "the only one that differs"
        return f"{self.times:.3g} x the next difference"


def elements(a: Path, b: Path, step: int, ranks: int) -> Iterator[Element]:
    """Yield the element that differs most of each tensor with any other bit in the checkpoints of a
    step.

    Args:
        a, b: folders of checkpoints.
        ranks: of the run B.
    """
    ours, theirs = (
        CheckpointWeights(NamedPath(name, listing.step_folder(folder, step)), saved_name=str)
        for name, folder in (("A", a), ("B", b))
    )
    for name, saved in ours.saved.items():
        if name.startswith(RNG) or theirs.saved.get(name) != saved:
            continue
        tensor = ours.read(name)
        found = compare(name, tensor, theirs.read(name))
        if found is None:
            continue
        scale = float(tensor.double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())
        chunks = theirs.saved[name].chunks
        rank = next((_writer(chunk) for chunk in chunks if _holds(chunk, found.index)), 0)
        has_replicas = len(set(map(_writer, chunks))) < ranks
        yield Element(
            Place(*_parts_of(name), found.index, rank, has_replicas),
            distance=found.largest,
            size=found.largest / max(scale, 1e-30),
            times=found.largest / found.second if found.second else math.inf,
        )


def _writer(chunk: Chunk) -> int:
    match = WRITER.fullmatch(chunk.file)
    return int(match[1]) if match else 0


def _holds(chunk: Chunk, index: Sequence[int]) -> bool:
    inside = zip(index, chunk.offset, chunk.shape, strict=True)
    return all(begin <= i < begin + size for i, begin, size in inside)


def difference(folders: Sequence[str], parameter: str, value: str) -> Tensor:
    """Return the second of two checkpoints of a tensor without the first, fp64.

    Args:
        folders: of a step.
        value: `WEIGHT`, or a key of the optimizer's state.
    """
    name = MODEL + parameter if value == WEIGHT else f"{OPTIMIZER}state.{parameter}.{value}"
    a, b = (CheckpointWeights(NamedPath(one, Path(one)), str).read(name) for one in folders)
    return (b.double() - a.double()).nan_to_num(LARGE, LARGE, -LARGE)


def suspects(found: Sequence[Element]) -> list[Element]:
    """Return the weights that stand out most."""
    weights = [one for one in found if one.place.value == WEIGHT]
    return sorted(weights, key=lambda one: -one.times)[:MOST_SUSPECTS]


def lone_element(found: Sequence[Element], *, is_known: bool) -> Element | None:
    """Return the element that stands out most, by the scale of its tensor, if one does so clearly
    and in several values: what follows from it stands out in one.

    Args:
        is_known: the elements are of the groups in which the runs differed first.
    """
    alone = defaultdict[object, list[Element]](list)
    for element in found:
        if element.times > STANDS_OUT and element.size > LEAST_SIZE:
            alone[element.place.parameter, element.place.index].append(element)
    tops = [
        max(of_place, key=lambda one: one.size)
        for of_place in alone.values()
        if len(of_place) > 1 or len(found) == 1
    ]
    tops.sort(key=lambda one: -one.size)
    times = 3.0 if is_known else 10.0
    is_clear = len(tops) == 1 or (len(tops) > 1 and tops[0].size > times * tops[1].size)
    return tops[0] if is_clear else None


def _parts_of(saved_name: str) -> tuple[str, str]:
    """Return the parameter of a saved tensor, and "weight" or the key of its optimizer state."""
    _, _, name = saved_name.partition(".")
    if not saved_name.startswith(OPTIMIZER):
        return name, WEIGHT
    name, _, value = name.removeprefix("state.").rpartition(".")
    return name, value


def common_steps(a: Path, b: Path) -> list[int]:
    """Return the steps of which both folders hold a complete checkpoint."""
    both = (set(listing.saved_steps(folder)) for folder in (a, b))
    return sorted(set.intersection(*both))


def first_other(a: Path, b: Path, steps: Sequence[int]) -> int | None:
    """Return the first of `steps` whose checkpoints differ in any bit; they are bisected, since
    runs that have parted don't meet again."""
    index = bisect_left(steps, True, key=lambda step: any(elements(a, b, step, 0)))
    return steps[index] if index < len(steps) else None
