"""Blocks of files in object storage, kept in a local folder of a bounded size."""

import os
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Protocol


class Fetched(Protocol):
    """A file of which bytes can be fetched from its storage."""

    path: str

    def fetch(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on; fewer only at the end of the file."""


class BlockCache:
    """Blocks of files in object storage, in a folder that all processes of a machine share.

    Args:
        limit: bytes; blocks that were written first are deleted beyond it.
    """

    BLOCK = 1 << 18

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        self._written, self._guard = limit, threading.Lock()  # the first write looks at all

    def read(self, file: Fetched, stamp: str, begin: int, size: int) -> bytes:
        """Return bytes of `file`, as `RangeFile.read`."""
        first, last = begin // self.BLOCK, (begin + size - 1) // self.BLOCK
        content = b"".join(self._block(file, stamp, block) for block in range(first, last + 1))
        return content[begin - first * self.BLOCK :][:size]

    def forget(self, file: Fetched, stamp: str, begin: int, size: int) -> None:
        """Delete the blocks that hold these bytes."""
        for block in range(begin // self.BLOCK, (begin + size - 1) // self.BLOCK + 1):
            self._place(file, stamp, block).unlink(missing_ok=True)

    def _place(self, file: Fetched, stamp: str, block: int) -> Path:
        name = blake2b(f"{file.path}\n{stamp}".encode(), digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}-{block}"

    def _block(self, file: Fetched, stamp: str, block: int) -> bytes:
        path = self._place(file, stamp, block)
        try:
            return path.read_bytes()
        except OSError:
            content = file.fetch(block * self.BLOCK, self.BLOCK)
            self._keep(path, content)
            return content

    def _keep(self, path: Path, content: bytes) -> None:
        """Write a block. Where there is no room, it is read again from its storage."""
        own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            own.write_bytes(content)  # not flushed: its checksum is compared at every read
            own.replace(path)
        except OSError:
            own.unlink(missing_ok=True)
        with self._guard:
            self._written += len(content)
            if self._written >= self._limit // 16:
                self._written = 0
                self._shrink()

    def _shrink(self) -> None:
        """Delete the oldest blocks until a sixteenth of the limit is free."""
        found = []
        for path in self.folder.glob("??/*"):
            try:
                state = path.stat()
                found.append((state.st_mtime_ns, state.st_size, path))
            except OSError:  # another process deleted it
                continue
        size = sum(size for _, size, _ in found)
        for _, of_one, path in sorted(found):
            if size <= self._limit * 15 // 16:
                return
            path.unlink(missing_ok=True)
            size -= of_one


def block_cache(root: Path, gib: float) -> BlockCache:
    """Return the cache of blocks of object storage that goes with token caches below `root`."""
    return BlockCache(root / "blocks", int(gib * (1 << 30)))
