"""The content of a torch.save file, read without running any of it. Free of torch.

Format: a zip, uncompressed, of one folder: `data.pkl`, the pickled object, in which a tensor is a
call of torch._utils._rebuild_tensor_v2 with its storage, offset, size and strides; and `data/KEY`,
the bytes of each storage. Source: torch/serialization.py, `_save`.
"""

import zipfile
from pathlib import Path
from typing import Any

from meshwright.checkpoint.inert_pickle import Record, read_pickle
from meshwright.exchange.safetensors_file import StoredTensor

TENSOR = ("torch._utils", "_rebuild_tensor_v2")
PARAMETER = ("torch._utils", "_rebuild_parameter")
TYPES = {"FloatStorage": "F32", "BFloat16Storage": "BF16", "HalfStorage": "F16"}
"""Classes of storages, and safetensors' names of their types."""
ZIP = b"PK\x03\x04"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the dict that `file` holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not such a file, or not a whole one, or holds anything else.
    """
    with open(file, "rb") as stream:
        first = stream.read(len(ZIP))
    if first != ZIP:
        raise ValueError("is not a zip, as torch.save writes since torch 1.6")
    try:
        with zipfile.ZipFile(file) as archive:
            folder = archive.namelist()[0].partition("/")[0]
            pickled = archive.getinfo(f"{folder}/data.pkl")
            if pickled.compress_type != zipfile.ZIP_STORED:  # it may be any size, read
                raise ValueError("is compressed, which torch.save does not do")
            content = archive.read(pickled)
    except (zipfile.BadZipFile, KeyError, IndexError, RuntimeError, EOFError) as error:
        raise ValueError(f"is cut off, or damaged: {error}") from None
    try:
        tensors = read_pickle(content, _is_allowed)
        if not isinstance(tensors, dict):
            raise ValueError("it is no dict of tensors")
        return {str(name): _tensor(file, value) for name, value in tensors.items()}
    except ValueError as error:
        raise ValueError(f"holds more than tensors: {error}") from None


def _is_allowed(module: str, name: str) -> bool:
    is_storage = module == "torch" and name.endswith("Storage")
    return (module, name) in (TENSOR, PARAMETER) or is_storage


def _tensor(file: Path, value: Any) -> StoredTensor:
    try:
        if value.called == ".".join(PARAMETER):
            value = value.arguments[0]
        (_, storage, *_), _, shape, *_ = value.arguments
        assert issubclass(storage, Record)
        kind = storage.called.removeprefix("torch.")
        return StoredTensor(file, TYPES.get(kind, kind), tuple(shape))
    except (AttributeError, AssertionError, IndexError, TypeError, ValueError):
        raise ValueError(f"{value!r} is no tensor") from None
