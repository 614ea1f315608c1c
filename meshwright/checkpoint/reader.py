"""Reads a checkpoint of tensors, and runs nothing that it names."""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from meshwright.checkpoint.saved_tensors import INDEX, PLAIN_DATA


def _member(cls: object, name: str) -> enum.Enum:
    """A member of an enumeration: some versions of Python (3.11.2) pickle it as a `getattr`."""
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise pickle.UnpicklingError(f"it takes {name} of {cls!r}, which is no enumeration")
    return cls[name]


class _PlainUnpickler(pickle.Unpickler):
    """Refuses all but data: a pickle otherwise runs whatever code it names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in PLAIN_DATA:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return super().find_class(module, name)


class PlainReader(dcp.FileSystemReader):
    """Reads tensors and nothing else, by an index that it reads once, and as data.

    torch's own unpickles the index anew for every load; and what that calls an object, torch's
    planner unpickles, though a tensor is asked for.

    Raises:
        Exception: of any kind, if there is no index or it is not plain data.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        content = (folder / INDEX).read_bytes()
        self._metadata: Metadata = _PlainUnpickler(io.BytesIO(content)).load()
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise pickle.UnpicklingError(f"{item.dest_index.fqn} is an object there, no tensor")
        return super().read_data(plan, planner)
