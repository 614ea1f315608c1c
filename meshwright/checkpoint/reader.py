"""Reads the tensors of a checkpoint, on any mesh, and runs nothing that it names; compares two."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from meshwright.checkpoint.index import Chunk, SavedTensor, read_saved_tensors
from meshwright.checkpoint.manifest import OPTIMIZER
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.checkpoint.state import AVERAGE, MODEL
from meshwright.parallelisms.shards import Box, local_box, part_of_box
from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import NamedPath
from meshwright.system.retries import may_pass


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, as a folder holds it."""

    box: Box
    """Its place in the tensor."""
    read: Callable[[Box], Tensor]
    """Returns a part of it."""
    order: tuple[str, int] = ("", 0)
    """File, and position there."""


def _overlap(a: Box, b: Box) -> Box | None:
    starts = tuple(map(max, a[0], b[0]))
    ends = (min(i + m, j + n) for i, m, j, n in zip(*a, *b, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, shape) if all(length > 0 for length in shape) else None


def _within(part: Box, box: Box) -> Box:
    """Return `part` with its offset counted from that of `box`."""
    return tuple(i - j for i, j in zip(part[0], box[0], strict=True)), part[1]


Put = Callable[[Tensor, Tensor], object]


class Weights(ABC):
    """The tensors in a folder of any format, by the names of the plain model."""

    @abstractmethod
    def pieces(self, name: str) -> Iterable[Piece]:
        """Yield pieces that together are the tensor `name`."""

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], put: Put = Tensor.copy_) -> None:
        """Fill `tensors`, plain or sharded, in place, with one piece at a time in memory. Not
        collective.

        Args:
            put: gets this rank's part of a tensor, and the values for it.

        Raises:
            ConfigError: if one is missing, has a different shape, or is damaged.
            StorageError: if a file can't be read now.
        """
        found = []
        for name, tensor in tensors.items():
            local, offset = local_box(tensor.detach())
            box = offset, tuple(local.shape)
            for piece in self.pieces(name):
                if part := _overlap(box, piece.box):
                    found.append((piece, part_of_box(local, _within(part, box)), part))
        for piece, target, part in sorted(found, key=lambda of: of[0].order):
            put(target, piece.read(_within(part, piece.box)))


OTHER = "name a checkpoint of this model"


class CheckpointWeights(Weights):
    """Tensors in a step's folder.

    Args:
        saved_name: a tensor's name there; by default our model's name.

    Raises:
        ConfigError, StorageError: if its index can't be read.
    """

    def __init__(self, place: NamedPath, saved_name: Callable[[str], str] = MODEL.__add__) -> None:
        self._place, self._saved_name = place, saved_name
        self.saved = read_saved_tensors(place)
        """By their names there."""
        self._file: BufferedReader | None = None

    def pieces(self, name: str) -> Iterator[Piece]:
        for chunk in self._find(name).chunks:
            order = chunk.file, chunk.start
            yield Piece((chunk.offset, chunk.shape), partial(self._read, chunk), order)

    def load(self, tensors: Mapping[str, Tensor], put: Put = Tensor.copy_) -> None:
        for name, tensor in tensors.items():
            theirs, ours = self._find(name).shape, tuple(tensor.shape)
            rule = f"{self._saved_name(name)} has shape {theirs} there, not {ours}"
            self._place.check(theirs == ours, rule, OTHER)
        try:
            super().load(tensors, put)
        finally:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, name: str) -> Tensor:
        """Return the full tensor `name`, in the type it was saved in; raises as `load`."""
        saved = self._find(name)
        try:
            whole = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        except RuntimeError as error:  # the index is forged: no memory is as large
            raise self._place.error(f"cannot be read: {error}") from None
        self.load({name: whole})
        return whole

    def _find(self, name: str) -> SavedTensor:
        saved_name = self._saved_name(name)
        self._place.check(saved_name in self.saved, f"the checkpoint has no {saved_name}", OTHER)
        return self.saved[saved_name]

    def _read(self, chunk: Chunk, box: Box) -> Tensor:
        # private, and used by torch's own reader to the same end; if it moves, it is there
        from torch.distributed.checkpoint.utils import _create_file_view

        path = str(self._place.path / chunk.file)
        try:
            if self._file is None or self._file.closed or self._file.name != path:
                self._close()
                self._file = open(path, "rb")  # noqa: SIM115
            view = _create_file_view(self._file, chunk.start, chunk.length)
            tensor = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
            if tuple(tensor.shape) != chunk.shape:
                raise ValueError(f"{chunk.file} has shape {tuple(tensor.shape)}, not {chunk.shape}")
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            if not may_pass(error):
                fix = "copy the folder again, so that this user may read all of it"
                raise self._place.error(f"{chunk.file} {what}", fix) from None
            raise StorageError(f"{path} {what}\n  fix: run the same command again") from None
        except Exception as error:  # a damaged pickle raises any exception
            raise self._place.error(f"cannot be read: {error}") from None
        return part_of_box(tensor, box)


def restore(
    folder: Path, state: dict[str, Tensor], excluded: Collection[str], ranks: AllRanks
) -> dict[str, Tensor]:
    """Fill the tensors of `state` in place from the checkpoint in `folder`. Collective.

    Args:
        excluded: parts to leave out, as `manifest.excluded_parts` names them.

    Returns:
        The part of `state` that was filled.

    Raises:
        ConfigError: on every rank, if a tensor is missing on one, has another shape, or is damaged.
        StorageError: on every rank, if one of them can't read a file now.
    """
    wanted = {
        name: tensor
        for name, tensor in state.items()
        if not (OPTIMIZER in excluded and name.startswith(f"{OPTIMIZER}."))
    }

    def fill() -> None:
        weights = CheckpointWeights(NamedPath("checkpoint.load_step", folder), str)
        has_average = any(name.startswith(AVERAGE) for name in weights.saved)
        for name in wanted.keys() - weights.saved.keys():
            # a rank that wasn't there when the checkpoint was written keeps the RNG it has; means
            # that weren't kept then start with the weights
            if name.startswith("rng.") or (name.startswith(AVERAGE) and not has_average):
                del wanted[name]
            elif name.startswith(f"{OPTIMIZER}."):
                raise ConfigError(
                    "optimizer.name",
                    f"optimizer.name: checkpoint {folder} has no {name}: it was saved with another "
                    "optimizer\n  fix: use that, or start with a fresh one: "
                    'checkpoint.exclude_from_loading = ["optimizer"]',
                )
        weights.load(wanted)

    ranks.on_every(fill)
    return wanted


CHUNK = 1 << 20
"""Elements that are in float64 at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """Between two tensors of one shape."""

    name: str
    count: int
    """Elements that differ in any bit."""
    numel: int
    largest: float
    """Of |a - b|; infinite where one isn't a number."""
    second: float
    """The next one, of a different element; 0: there is none."""
    index: tuple[int, ...]
    """Where |a - b| is largest."""
    a: float
    """The element there."""
    b: float


def compare(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """Return the difference, if there is any, of two tensors of one shape and type."""
    count, largest, second, place = 0, -1.0, 0.0, 0
    flat_a, flat_b = a.flatten(), b.flatten()
    for start in range(0, a.numel(), CHUNK):
        some_a, some_b = flat_a[start : start + CHUNK], flat_b[start : start + CHUNK]
        bytes_differ = some_a.view(torch.uint8) != some_b.view(torch.uint8)
        differ = bytes_differ.view(-1, a.element_size()).any(dim=1)
        if not (unequal := int(differ.sum())):
            continue
        count += unequal
        # only the differing elements: 0 and -0, or two kinds of NaN, are 0 apart
        wide_a, wide_b = some_a[differ].double(), some_b[differ].double()
        apart = (wide_a - wide_b).abs()
        apart[(wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
        apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        top, where = apart.topk(min(2, unequal))
        # -1 stands for no element so far
        *_, second, _ = sorted([0.0, max(largest, 0.0), second, *top.tolist()])
        if float(top[0]) > largest:
            largest = float(top[0])
            place = start + int(differ.nonzero()[where[0]])
    if not count:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
    values = float(flat_a[place]), float(flat_b[place])
    return TensorDifference(name, count, a.numel(), largest, second, index, *values)
