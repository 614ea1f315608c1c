"""Reads the index of a checkpoint: which tensors it holds. Free of torch.

The index, `.metadata`, is a pickle of torch.distributed.checkpoint.metadata.Metadata; its
`state_dict_metadata` has the shape and the type of every tensor by name.
"""

import io
import math
import operator
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from meshwright.system.files import Place


class Record:
    """A call that was not made. Each function named has a class of its own, derived from this."""

    called: ClassVar[str]
    """Its name, as `package.module.name`."""
    arguments: tuple[Any, ...]
    state: Any = None
    """The state to set on the result."""

    def __new__(cls, *arguments: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Makes dicts, lists, numbers and text as they are, all else a `Record`, or a class of them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if not _is_allowed(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return type(name, (Record,), {"called": f"{module}.{name}"})


INDEX = ".metadata"

METADATA = "torch.distributed.checkpoint.metadata"

PATHLIB = ("pathlib", "pathlib._local")
"""Where Python's paths are; the second in 3.13 alone."""

PLAIN_DATA = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in PATHLIB for name in ("PosixPath", "WindowsPath")),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        (METADATA, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""The classes in the index of a checkpoint of tensors, beside numbers and names of types."""

ITEM_BYTES = {
    **dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor's entry in the index."""

    dtype: str
    """As torch calls it: float32, bfloat16, ..."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of its elements together."""
        return self.numel * ITEM_BYTES.get(self.dtype, 0)

    @property
    def size(self) -> str:
        """Its shape in words: 16x32."""
        return "x".join(map(str, self.shape)) or "scalar"

    def __str__(self) -> str:
        return f"{self.dtype} {self.size}"


def read_saved_tensors(place: Place) -> dict[str, SavedTensor]:
    """Return every tensor of the checkpoint, by name; other entries are left out.

    Raises:
        ConfigError: if the index is not there, is damaged, or names anything but data.
    """
    try:
        entries: dict[str, Any] = read_index(place.path).state["state_dict_metadata"]
        return {name: read_tensor(entry) for name, entry in entries.items() if is_tensor(entry)}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    except (AttributeError, KeyError, TypeError, IndexError):
        reason = "it is no index of a checkpoint"
    raise place.error(f"{INDEX} cannot be read, the index of its tensors: {reason}")


def read_index(checkpoint: Path) -> Record:
    """Return the index, of which nothing has been made but `Record`s.

    Raises:
        OSError: if it is not there.
        ValueError: if it is damaged, or names anything but data.
    """
    content = (checkpoint / INDEX).read_bytes()
    try:
        index = _InertUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises any exception
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(index, Record):
        raise ValueError("it is no index of a checkpoint")
    return index


def _is_allowed(module: str, name: str) -> bool:
    is_member = (module, name) == ("builtins", "getattr")  # of an enumeration, in Python 3.11.2
    return (module, name) in PLAIN_DATA or is_member or (module == "torch" and name in ITEM_BYTES)


def is_tensor(entry: Record) -> bool:
    """Return whether an entry of the index's `state_dict_metadata` is a tensor's, not an
    object's."""
    return entry.called == f"{METADATA}.TensorStorageMetadata"


def read_tensor(entry: Record) -> SavedTensor:
    """Parse the entry of a tensor.

    Raises:
        AttributeError, KeyError, TypeError, IndexError: if it is none.
    """
    dtype: type[Record] = entry.state["properties"].state[0]
    shape = tuple(map(operator.index, entry.state["size"].arguments[0]))
    return SavedTensor(dtype.called.removeprefix("torch."), shape)
