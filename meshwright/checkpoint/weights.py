"""The weights of a checkpoint of ours, without what else a resume needs."""

import enum
import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from meshwright.checkpoint.hf_folder import Place
from meshwright.checkpoint.state import MODEL
from meshwright.errors import ConfigError

PLAIN_DATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""All that the index of a checkpoint of tensors is made of, beside numbers and names of types."""


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


class _Reader(dcp.FileSystemReader):
    """Reads the index once, and as data: torch's own unpickles it anew for every load."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        content = (folder / ".metadata").read_bytes()
        self._metadata: Metadata = _PlainUnpickler(io.BytesIO(content)).load()
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class CheckpointWeights:
    """The model's tensors in a step's folder.

    Raises:
        ConfigError: if it cannot be read.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        try:
            self._reader = _Reader(place.path)
        except Exception as error:  # a pickle that is damaged raises what it likes
            raise self._unreadable(error) from None

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Not collective.

        Raises:
            ConfigError: if one is missing, has another shape, or cannot be read.
        """
        state = {MODEL + name: tensor.detach() for name, tensor in parameters.items()}
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
        """The whole parameter `name`, in the type it was saved in.

        Raises:
            ConfigError: as `load`'s.
        """
        saved = self._reader.read_metadata().state_dict_metadata.get(MODEL + name)
        self._place.check(saved is not None, f"the checkpoint has no {MODEL}{name}")
        assert isinstance(saved, TensorStorageMetadata)
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        self.load({name: tensor})
        return tensor

    def _unreadable(self, error: BaseException) -> ConfigError:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        reason = causes[0][0] if causes else error
        key, path = self._place.key, str(self._place.path)
        return ConfigError(key, f"{key} = {path!r}: cannot be read: {reason}")
