"""Reads a checkpoint of tensors, and runs nothing that it names."""

import pickle
from collections.abc import Collection
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

from meshwright.checkpoint import manifest as exclude
from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.index import Record, is_tensor, read_index, read_tensor
from meshwright.checkpoint.manifest import is_file_name
from meshwright.checkpoint.on_ranks import on_every_rank
from meshwright.checkpoint.state import OPTIMIZER
from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import read_patiently


class SafeCheckpointReader(dcp.FileSystemReader):
    """Reads tensors and nothing else, by an index that it reads once, and as data.

    torch's own unpickles the index anew for every load, and its planner unpickles any entry that
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
        if exclude.OPTIMIZER in excluded:
            wanted = {k: v for k, v in wanted.items() if not k.startswith(OPTIMIZER)}
        # a rank that was not there when the checkpoint was written keeps the RNG it has
        wanted = {k: v for k, v in wanted.items() if k in saved or not k.startswith("rng.")}
        for name, tensor in wanted.items():
            theirs = getattr(saved.get(name), "size", None)  # an object's has none
            if theirs != tensor.shape:
                found = "is no tensor there" if name in saved else "is not in it"
                if theirs is not None:
                    found = f"has shape {tuple(theirs)} there"
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
