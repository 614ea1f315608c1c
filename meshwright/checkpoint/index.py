"""Reads the index of a checkpoint: its tensors, and where their parts lie. Free of torch.

The index, `.metadata`, is a pickle of torch.distributed.checkpoint.metadata.Metadata. Its
`state_dict_metadata` has type, shape and chunks of every tensor by name, its `storage_data` the
place of each chunk. It is read as data: to unpickle it can run code, or change torch's classes.
"""

import io
import math
import operator
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from meshwright.checkpoint.manifest import check_file_name
from meshwright.system.errors import ConfigError, StorageError
from meshwright.system.files import LFS_FIX, LFS_POINTER, LFS_RULE, NamedPath
from meshwright.system.retries import read_patiently


class Record:
    """A call that wasn't made. Each function named has its own class, derived from this."""

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
        return type(name, (Record,), {"called": f"{module}.{name}"})


INDEX = ".metadata"

ITEM_BYTES = {
    **dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, as one rank wrote it: a file of torch.save's within a file."""

    offset: tuple[int, ...]
    """In the tensor."""
    shape: tuple[int, ...]
    file: str
    start: int
    """Its first byte in the file."""
    length: int
    """In bytes."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor's entry in the index."""

    dtype: str
    """As torch calls it: float32, bfloat16, ..."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = field(compare=False)

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of its elements together."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def size(self) -> str:
        """Its shape in words: 16x32."""
        return "x".join(map(str, self.shape)) or "scalar"

    def __str__(self) -> str:
        return f"{self.dtype} {self.size}"


def read_saved_tensors(place: NamedPath) -> dict[str, SavedTensor]:
    """Return every tensor of the checkpoint, by name; other entries are left out.

    Raises:
        StorageError: if the index can't be read now.
        ConfigError: if it isn't there, is damaged, or names a file outside of the folder.
    """
    file = place.path / INDEX
    try:
        content = read_patiently(file, file.read_bytes)
        place.check(LFS_POINTER.match(content) is None, f"{INDEX} {LFS_RULE}", LFS_FIX)
        index = _InertUnpickler(io.BytesIO(content)).load().state
        where = {
            (key.state["fqn"], _numbers(key.state["offset"])): entry.state
            for key, entry in index["storage_data"].items()
            if key.state.get("offset") is not None  # it is of a tensor
        }
        return {
            name: _read_tensor(name, entry.state, where)
            for name, entry in index["state_dict_metadata"].items()
            if entry.called.endswith(".TensorStorageMetadata")
        }
    except (StorageError, ConfigError):
        raise
    except (AttributeError, KeyError, TypeError, IndexError):
        reason = "it is no index of a checkpoint"
    except Exception as error:  # a damaged pickle raises any exception
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise place.error(f"{INDEX} cannot be read, the index of its tensors: {reason}")


def _read_tensor(name: str, entry: Any, where: dict[Any, Any]) -> SavedTensor:
    """Parse the entry of a tensor.

    A forged size would be memory that nothing fills.

    Raises:
        ValueError: if it isn't made of its chunks, or those have no place in files of the folder.
        AttributeError, KeyError, TypeError, IndexError: if it is no entry.
    """
    dtype = entry["properties"].state[0].called.removeprefix("torch.")
    chunks = []
    for chunk in entry["chunks"]:
        offset, shape = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
        place = where.get((name, offset))
        if place is None:
            raise ValueError(f"a part of {name} is in no file")
        file, start, length = place["relative_path"], place["offset"], place["length"]
        check_file_name(file)
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed")
        if start < 0 or math.prod(shape) * ITEM_BYTES[dtype] > length:
            raise ValueError(f"{name} is larger than its {length:,} bytes")
        chunks.append(Chunk(offset, shape, file, start, length))
    found = SavedTensor(dtype, _numbers(entry["size"]), tuple(chunks))
    if sum(math.prod(chunk.shape) for chunk in chunks) != found.numel:
        raise ValueError(f"the parts of {name} are not all of it")
    return found


def _numbers(size: Record) -> tuple[int, ...]:
    return tuple(map(operator.index, size.arguments[0]))
