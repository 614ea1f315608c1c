"""Memory of large tensors on CPUs, from heaps of their own (large_blocks.cpp).

Malloc's heap grows by holes that smaller blocks have made too small (docs/performance.md).
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from meshwright.models.kernels import library

SOURCE = Path(__file__).with_suffix(".cpp")


OVERCOMMIT, NEVER = Path("/proc/sys/vm/overcommit_memory"), "2"


@cache
def take() -> str:
    """Have torch in this process take memory of 1 MiB or more from these heaps from now on.

    Returns:
        Why torch keeps its allocator; empty if it uses the heaps.
    """
    if sys.platform != "linux":
        return "this is not Linux"
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "addresses are limited (ulimit -v)"
    with suppress(OSError):  # /proc may be hidden
        if OVERCOMMIT.read_text().strip() == NEVER:
            return f"{OVERCOMMIT} is {NEVER}, which counts addresses as memory"
    try:
        # -lc10 is not among inductor's flags. The library that needs it is, but linkers drop
        # libraries without referenced symbols.
        loaded = library.load(SOURCE.read_text("utf-8"), ("-Wl,--no-as-needed",))
    except Exception as error:
        return f"{SOURCE.name} was not compiled: {library.first_line(error)}"
    loaded.take_large_blocks.argtypes = [ctypes.c_size_t]
    loaded.take_large_blocks.restype = ctypes.c_bool
    # addresses alone; no process has more memory than the machine
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "" if loaded.take_large_blocks(num_bytes) else "the system refused the address space"
