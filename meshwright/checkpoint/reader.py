"""Reads the tensors of a checkpoint, and runs nothing that it names; compares two of them."""

import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.index import Record, SavedTensor, is_tensor, read_index, read_tensor
from meshwright.checkpoint.manifest import OPTIMIZER, is_file_name
from meshwright.checkpoint.on_ranks import on_every_rank
from meshwright.checkpoint.state import AVERAGE, MODEL
from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import Place, read_patiently


class SafeCheckpointReader(dcp.FileSystemReader):
    """Reads tensors and nothing else, by an index that it reads once, and as data.

    torch's own unpickles the index again for every load, and its planner unpickles any entry that
    the index calls an object, though a tensor is asked for. It also opens any path in the index.

    Raises:
        OSError: if there is no index.
        ValueError: if it is damaged, names anything but data, or a file outside of the folder.
    """

    def __init__(self, folder: Path, part: tuple[int, int] = (0, 1)) -> None:
        """
        Args:
            part: (k, n): look at every n-th file from number k on. Ranks that share the rest would
                otherwise ask for the size of ranks x ranks files.
        """
        super().__init__(folder)
        index = read_index(folder)
        try:
            self._metadata = _metadata(index)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError):
            raise ValueError("it is no index of a checkpoint") from None
        _check_sizes(self._metadata, folder, part)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise pickle.UnpicklingError(f"{item.dest_index.fqn} is an object there, no tensor")
        return super().read_data(plan, planner)


def _metadata(index: Record) -> Metadata:
    """torch's own objects, made here: a pickle that made them could change their classes, too."""
    return Metadata(
        {name: _entry(record) for name, record in index.state["state_dict_metadata"].items()},
        storage_data={
            _key(key.state): _place(place.state)
            for key, place in index.state["storage_data"].items()
        },
        version=index.state.get("version"),
    )


def _check_sizes(index: Metadata, folder: Path, part: tuple[int, int]) -> None:
    """Check that tensors are made of their chunks, and that those are in the files.

    A forged size would otherwise be memory that nothing fills.

    Raises:
        OSError: if a file is not there.
        ValueError: if they are not.
    """
    names = sorted({place.relative_path for place in index.storage_data.values()})
    sizes = {name: (folder / name).stat().st_size for name in names[part[0] :: part[1]]}
    for key, place in index.storage_data.items():
        end = place.offset + place.length
        if not 0 <= place.offset <= end <= sizes.get(place.relative_path, end):
            raise ValueError(f"{key.fqn} is said to be outside of {place.relative_path}")
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        item = tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            place = index.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise ValueError(f"a part of {name} is in no file")
            if chunk.sizes.numel() * item > place.length and not place.transform_descriptors:
                raise ValueError(f"{name} is larger than its {place.length:,} bytes")
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise ValueError(f"the parts of {name} are not all of it")


def _entry(record: Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if not is_tensor(record):
        return BytesStorageMetadata()
    saved = read_tensor(record)
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, saved.dtype)),
        torch.Size(saved.shape),
        [
            ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
            for chunk in record.state["chunks"]
        ],
    )


def _key(state: dict[str, Any]) -> MetadataIndex:
    offset = state.get("offset")
    return MetadataIndex(state["fqn"], None if offset is None else _size(offset), state["index"])


def _place(state: dict[str, Any]) -> _StorageInfo:
    name = state["relative_path"]
    if not is_file_name(name):
        raise ValueError(f"it names {name!r}, which is no file of its folder")
    return _StorageInfo(name, state["offset"], state["length"], state.get("transform_descriptors"))


def _size(record: Record) -> torch.Size:
    return torch.Size(record.arguments[0])


def restore(
    folder: Path, state: dict[str, Tensor], excluded: Collection[str], group: ProcessGroup
) -> dict[str, Tensor]:
    """Fill the tensors of `state` in place from the checkpoint in `folder`. Collective over
    `group`.

    Args:
        excluded: parts to leave out, as `manifest.left_out` names them.

    Returns:
        The part of `state` that was filled.

    Raises:
        ConfigError: if the index names anything but data, or a tensor is missing or has another
            shape; `state` is then as it was.
        StorageError: on every rank, if one of them cannot read a file now.
    """
    with being_read(folder):
        opened: list[SafeCheckpointReader] = []
        part = (dist.get_rank(group), dist.get_world_size(group))
        on_every_rank(lambda: opened.append(_open(folder, part)), group)
        [reader] = opened
        saved = reader.read_metadata().state_dict_metadata
        wanted = state
        if OPTIMIZER in excluded:
            wanted = {k: v for k, v in wanted.items() if not k.startswith(f"{OPTIMIZER}.")}
        # a rank that was not there when the checkpoint was written keeps the RNG it has
        wanted = {k: v for k, v in wanted.items() if k in saved or not k.startswith("rng.")}
        if not any(name.startswith(AVERAGE) for name in saved):  # they begin there
            wanted = {k: v for k, v in wanted.items() if not k.startswith(AVERAGE)}
        for name, tensor in wanted.items():
            theirs = getattr(saved.get(name), "size", None)  # an object's has none
            if theirs != tensor.shape:
                found = "is no tensor there" if name in saved else "is not in it"
                if theirs is not None:
                    found = f"has shape {tuple(theirs)} there"
                elif name not in saved and name.startswith(f"{OPTIMIZER}."):
                    raise ConfigError(
                        "optimizer.name",
                        f"optimizer.name: checkpoint {folder} has no {name}: it was saved with "
                        "another optimizer\n  fix: use that, or begin with a fresh one: "
                        'checkpoint.exclude_from_loading = ["optimizer"]',
                    )
                raise ConfigError(
                    "checkpoint.folder",
                    f"checkpoint {folder} is of another model: {name} has shape "
                    f"{tuple(tensor.shape)} here and {found}"
                    "\n  fix: use another job.dump_folder, or the model it was saved from",
                )
        try:
            dcp.load(wanted, storage_reader=reader, process_group=group)
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            if not isinstance(failure, OSError):
                raise
            what = f"rank {rank}: checkpoint {folder} cannot be read: {failure}"
            raise StorageError(f"{what}\n  fix: start again") from error
    return wanted


def _open(checkpoint: Path, part: tuple[int, int]) -> SafeCheckpointReader:
    try:
        return read_patiently(checkpoint, lambda: SafeCheckpointReader(checkpoint, part))
    except StorageError:
        raise
    except Exception as error:  # a damaged pickle raises any exception
        raise ConfigError(
            "checkpoint.load_step",
            f"checkpoint {checkpoint} cannot be read: {error}"
            "\n  fix: name another step in checkpoint.load_step",
        ) from None


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
