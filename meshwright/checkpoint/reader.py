"""Reads a checkpoint of tensors, and runs nothing that it names."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo  # private: the values of the index
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

from meshwright.checkpoint.inert_pickle import Record
from meshwright.checkpoint.manifest import is_file_name
from meshwright.checkpoint.saved_tensors import is_tensor, read_index, read_tensor


class SafeCheckpointReader(dcp.FileSystemReader):
    """Reads tensors and nothing else, by an index that it reads once, and as data.

    torch's own unpickles the index anew for every load, and its planner unpickles any entry that
    the index calls an object, though a tensor is asked for. It also opens any path in the index.

    Raises:
        OSError: if there is no index.
        ValueError: if it is damaged, names anything but data, or a file outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        index = read_index(folder)
        try:
            self._metadata = _metadata(index)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError):
            raise ValueError("it is no index of a checkpoint") from None
        _check_sizes(self._metadata, folder)
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


def _check_sizes(index: Metadata, folder: Path) -> None:
    """Check that tensors are made of their chunks, and that those are in the files.

    A forged size would otherwise be memory that nothing fills.

    Raises:
        OSError: if a file is not there.
        ValueError: if they are not.
    """
    sizes = {
        name: (folder / name).stat().st_size
        for name in {place.relative_path for place in index.storage_data.values()}
    }
    for key, place in index.storage_data.items():
        if not 0 <= place.offset <= place.offset + place.length <= sizes[place.relative_path]:
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
