"""Files in memory that hold no descriptor."""

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Map a whole file as a read-only array, for as long as a view of it lives.

    `numpy.memmap` and `mmap.mmap` keep a descriptor for each file, and a process may have 1024: a
    mixture has thousands of files. The operating system needs none once the file is mapped. From
    Python 3.13 on, `mmap.mmap(..., trackfd=False)` says the same.

    Raises:
        OSError: if the file cannot be opened or mapped.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.empty(0, dtype)
        address = _C.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    content = (ctypes.c_ubyte * size).from_address(address)
    # not when the interpreter ends: a thread may still be reading
    weakref.finalize(content, _C.munmap, address, size).atexit = False
    array = np.frombuffer(memoryview(content), dtype)
    array.flags.writeable = False
    return array
