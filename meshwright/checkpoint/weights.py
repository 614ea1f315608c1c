"""Tensors of a checkpoint, mostly the model's, without the rest that a resume needs."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.checkpoint.index import SavedTensor
from meshwright.checkpoint.reader import SafeCheckpointReader
from meshwright.checkpoint.state import MODEL
from meshwright.system.errors import ConfigError
from meshwright.system.files import Place


class CheckpointWeights:
    """Tensors in a step's folder, of ours or of any torch.distributed.checkpoint.

    Args:
        saved_name: a tensor's name there; by default our model's name.

    Raises:
        ConfigError: if it cannot be read.
    """

    def __init__(self, place: Place, saved_name: Callable[[str], str] = MODEL.__add__) -> None:
        self._place, self._saved_name = place, saved_name
        try:
            self._reader = SafeCheckpointReader(place.path)
        except Exception as error:  # a damaged pickle raises any exception
            raise self._unreadable(error) from None

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Not collective.

        Raises:
            ConfigError: if one is missing, has another shape, or cannot be read.
        """
        state = {self._saved_name(name): tensor.detach() for name, tensor in parameters.items()}
        saved = self._reader.read_metadata().state_dict_metadata
        for name, tensor in state.items():
            self._place.check(name in saved, f"the checkpoint has no {name}")
            shape = tuple(getattr(saved[name], "size", ()))
            self._place.check(
                shape == tuple(tensor.shape),
                f"{name} has shape {shape} there, not {tuple(tensor.shape)}",
            )
        try:
            with warnings.catch_warnings():  # that there is but one process; on ranks it is not so
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def read(self, name: str) -> Tensor:
        """Return the whole parameter `name`, in the type it was saved in.

        Raises:
            ConfigError: as `load`'s.
        """
        saved_name = self._saved_name(name)
        saved = self._reader.read_metadata().state_dict_metadata.get(saved_name)
        self._place.check(saved is not None, f"the checkpoint has no {saved_name}")
        assert isinstance(saved, TensorStorageMetadata)
        try:
            tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        except RuntimeError as error:  # a tensor that is larger than any memory
            raise self._unreadable(error) from None
        self.load({name: tensor})
        return tensor

    def _unreadable(self, error: BaseException) -> ConfigError:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        reason = causes[0][0] if causes else error
        return self._place.error(f"cannot be read: {reason}")


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
    """Of |a - b|; infinite where one is not a number."""
    relative: float
    """Largest of |a - b| / max(|a|, |b|)."""
    index: tuple[int, ...]
    """Where |a - b| is largest."""
    a: float
    """The element there."""
    b: float


def compare_tensors(
    a: CheckpointWeights, b: CheckpointWeights, names: Mapping[str, SavedTensor]
) -> Iterator[TensorDifference | None]:
    """For each of `names`, which both have in one shape and type: their difference, if any.

    Raises:
        ConfigError: if one cannot be read.
    """
    for name in names:
        yield _compare(name, a.read(name), b.read(name))


def _compare(name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    count, largest, relative, place = 0, -1.0, 0.0, 0
    flat_a, flat_b = a.flatten(), b.flatten()
    for start in range(0, a.numel(), CHUNK):
        some_a, some_b = flat_a[start : start + CHUNK], flat_b[start : start + CHUNK]
        differ = _bits_differ(some_a, some_b)
        if not (unequal := int(differ.sum())):
            continue
        count += unequal
        # only the differing elements: 0 and -0, or two kinds of NaN, are 0 apart
        wide_a, wide_b = some_a[differ].double(), some_b[differ].double()
        apart = (wide_a - wide_b).abs()
        apart[(wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
        apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        scale = torch.maximum(wide_a.abs(), wide_b.abs())
        ratio = torch.where(apart == 0, 0.0, apart / scale).nan_to_num_(nan=torch.inf)
        relative = max(relative, float(ratio.max()))
        where = int(apart.argmax())
        if float(apart[where]) > largest:
            largest = float(apart[where])
            place = start + int(differ.nonzero()[where])
    if not count:
        return None
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
    values = float(flat_a[place]), float(flat_b[place])
    return TensorDifference(name, count, a.numel(), largest, relative, index, *values)


def _bits_differ(a: Tensor, b: Tensor) -> Tensor:
    """By element, whether any bit does."""
    size = a.element_size()
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, size).any(dim=1)
