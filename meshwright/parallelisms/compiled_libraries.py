"""Libraries in the cache of torch.compile that a killed job has left unfinished.

Torch links a library under its final name, and takes every file of such a name for whole (2.13:
`_worker_compile_cpp` in torch/_inductor/codecache.py). If the linker is killed, later jobs end with
"file too short", "invalid ELF header" or SIGBUS.
"""

import fcntl
import functools
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from meshwright.system.log import logger

HEADER = struct.Struct("<4s36xQ10xHH2x")
"""Of an ELF file of 64 bits: its first four bytes; where the headers of sections start, how large
each is, and how many there are. They are at the end, and linkers write the first bytes last."""


@functools.cache
def remove_unfinished() -> None:
    """Remove unfinished libraries of the cache, once in a process; while another process links a
    library, it holds its lock."""
    for folder in _folders():
        removed = [path for path in folder.glob("*/*.so") if _remove_unfinished(path, folder)]
        if removed:
            words = "%s: removed %d unfinished libraries of a job that was killed while it compiled"
            logger.info(words, folder, len(removed))


def _folders() -> Iterator[Path]:
    """Yield the folder of torch's cache; unless it is given, this user's folders of such a name."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield Path(given)
        return
    for folder in Path(tempfile.gettempdir()).glob("torchinductor_*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield folder


def _remove_unfinished(path: Path, cache: Path) -> bool:
    with suppress(OSError):  # it is gone, locked, or the cache can't be written
        if is_whole(path):
            return False
        name = path.name.partition(".")[0]
        with open(cache / "locks" / f"{name}.lock", "a") as lock:  # as torch names it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_whole(path):
                path.unlink()
                return True
    return False


def is_whole(path: Path) -> bool:
    """Return whether a linker has finished a library."""
    with open(path, "rb") as file:
        head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    if len(head) < HEADER.size:
        return False
    magic, start, each, count = HEADER.unpack(head)
    return bool(magic == b"\x7fELF" and start + each * count <= size)
