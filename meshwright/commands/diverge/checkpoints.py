"""Between which checkpoints two runs part, and which element of which tensor is off by itself."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint import commit
from meshwright.checkpoint.reader import CheckpointWeights, TensorDifference, compare
from meshwright.checkpoint.state import OPTIMIZER, RNG
from meshwright.models.parameter import block_of
from meshwright.system.files import NamedPath

Lone = tuple[float, TensorDifference]
"""By how much of its tensor's scale an element differs, and the difference."""

STANDS_OUT = 3.0
"""Times the second largest difference of a tensor from which the largest stands by itself: rounding
spreads over many elements."""

WRITER = re.compile(r"__(\d+)_\d+\.distcp")
"""In the name of a file of a checkpoint: the rank that wrote it."""


@dataclass(frozen=True)
class LoneElement:
    """An element that differs by more than all others."""

    parameter: str
    value: str
    """"weight" or the key of the optimizer's state."""
    index: tuple[int, ...]
    times: float
    """The next difference in the tensor; infinite: no other element differs."""
    rank: int
    """That saved it."""
    has_replicas: bool
    """Other ranks hold it too."""

    @property
    def place(self) -> str:
        """The element, and who holds it."""
        replicas = " or a replica of its shard" if self.has_replicas else ""
        index = ", ".join(map(str, self.index))
        return f"{self.parameter}, element ({index}), on rank {self.rank}{replicas}"

    @property
    def how_far(self) -> str:
        """How much it stands out."""
        if math.isinf(self.times):
            return "the only one that differs"
        return f"{self.times:.3g} x the next difference"


@dataclass(frozen=True)
class Pair:
    """The checkpoints of both runs at one step."""

    a: Path
    b: Path

    def _open(self) -> tuple[CheckpointWeights, CheckpointWeights]:
        both = (NamedPath(*one) for one in (("A", self.a), ("B", self.b)))
        a, b = (CheckpointWeights(place, saved_name=str) for place in both)
        return a, b

    def others(self) -> Iterator[tuple[TensorDifference, float]]:
        """Yield the tensors that differ in any bit, each with the root mean square of A's."""
        a, b = self._open()
        for name, saved in a.saved.items():
            if name.startswith(RNG) or b.saved.get(name) != saved:
                continue
            tensor = a.read(name)
            if difference := compare(name, tensor, b.read(name)):
                finite = tensor.double().nan_to_num(0.0, 0.0, 0.0)
                yield difference, float(finite.square().mean().sqrt())

    def differs(self) -> bool:
        """Return whether any bit of any tensor differs."""
        return any(True for _ in self.others())

    def lone_element(self, ranks: int, groups: Collection[str]) -> tuple[LoneElement | None, int]:
        """Return the element that stands out most, by the scale of its tensor, if one does; and how
        many tensors differ.

        Args:
            ranks: of the run B.
            groups: of parameters in which the runs differed first; none: not known.
        """
        found, alone = (
            list(self.others()),
            defaultdict[tuple[str, tuple[int, ...]], list[Lone]](list),
        )
        for difference, scale in found:
            place = _parts_of(difference.name)[0], difference.index
            is_candidate = not groups or block_of(place[0]) in groups
            is_lone = difference.numel > 1 and difference.largest > STANDS_OUT * difference.second
            if is_candidate and is_lone:
                alone[place].append((difference.largest / max(scale, 1e-30), difference))
        tops = [
            max(of_place, key=lambda one: one[0])
            for of_place in alone.values()
            # an element whose gradient is nearly 0 stands out by chance, in its weight only, by
            # less than weights are large
            if len(of_place) > 1 or len(found) == 1 or of_place[0][0] >= 1
        ]
        tops.sort(key=lambda one: -one[0])
        # what follows from a flipped bit may stand out, too
        times = STANDS_OUT if groups else STANDS_OUT**2
        is_clear = len(tops) == 1 or (len(tops) > 1 and tops[0][0] > times * tops[1][0])
        return (self._element(tops[0][1], ranks) if is_clear else None), len(found)

    def _element(self, found: TensorDifference, ranks: int) -> LoneElement:
        _, b = self._open()
        chunks = b.saved[found.name].chunks
        writers = {int(match[1]) for c in chunks if (match := WRITER.fullmatch(c.file))}
        rank = 0
        for chunk in chunks:
            inside = zip(found.index, chunk.offset, chunk.shape, strict=True)
            if all(begin <= i < begin + size for i, begin, size in inside):
                match = WRITER.fullmatch(chunk.file)
                rank = int(match[1]) if match else 0
        name, value = _parts_of(found.name)
        times = found.largest / found.second if found.second else math.inf
        return LoneElement(name, value, found.index, times, rank, len(writers) < ranks)


def _parts_of(saved_name: str) -> tuple[str, str]:
    """Return the parameter of a saved tensor, and "weight" or the key of its optimizer state."""
    _, _, name = saved_name.partition(".")
    if not saved_name.startswith(OPTIMIZER):
        return name, "weight"
    name, _, value = name.removeprefix("state.").rpartition(".")
    return name, value


def common_steps(a: Path, b: Path) -> list[int]:
    """Return the steps of which both folders hold a complete checkpoint."""
    both = (set(commit.saved_steps(folder)) for folder in (a, b))
    return sorted(set.intersection(*both))


def first_other(a: Path, b: Path, steps: Sequence[int]) -> int | None:
    """Return the first of `steps` whose checkpoints differ in any bit; they are bisected, since
    runs that have parted don't meet again."""
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        if pair_at(a, b, steps[middle]).differs():
            high = middle
        else:
            low = middle + 1
    return steps[low] if low < len(steps) else None


def pair_at(a: Path, b: Path, step: int) -> Pair:
    """Return the checkpoints of one step."""
    return Pair(commit.step_folder(a, step), commit.step_folder(b, step))
