"""Blocks of files in object storage, kept on a machine's own disk."""

import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from meshwright.datasets.ranges import RangeFile
from meshwright.system.files import whole_file


class BlockCache:
    """Blocks of files in object storage, in a folder that all processes of a machine share. Beyond
    `limit` bytes, the blocks that were written first are deleted."""

    BLOCK = 1 << 18

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        self._written, self._guard = limit, threading.Lock()  # the first write looks at all

    def read(self, file: RangeFile, begin: int, size: int) -> bytes:
        content = b"".join(self._block(file, block) for block in self._blocks(begin, size))
        return content[begin % self.BLOCK :][:size]

    def forget(self, file: RangeFile, begin: int, size: int) -> None:
        """Delete the blocks that hold these bytes."""
        for block in self._blocks(begin, size):
            self._delete(self._place(file, block))

    def _blocks(self, begin: int, size: int) -> range:
        return range(begin // self.BLOCK, (begin + size - 1) // self.BLOCK + 1)

    def _place(self, file: RangeFile, block: int) -> Path:
        name = blake2b(f"{file.path}\n{file.stamp}".encode(), digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}-{block}"

    def _block(self, file: RangeFile, block: int) -> bytes:
        path = self._place(file, block)
        try:
            return path.read_bytes()
        except OSError:
            content = file.fetch(block * self.BLOCK, self.BLOCK)
        with suppress(OSError):  # no room: it is read again from its storage
            path.parent.mkdir(parents=True, exist_ok=True)
            # not flushed: its checksum is compared at every read
            with whole_file(path, is_flushed=False) as own:
                own.write(content)
        with self._guard:
            self._written += len(content)
            if self._written >= self._limit // 16:
                self._written = 0
                self._shrink()
        return content

    def _shrink(self) -> None:
        """Delete the oldest blocks until a sixteenth of the limit is free."""
        blocks = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process deleted it
                state = path.stat()
                blocks.append((state.st_mtime_ns, state.st_size, path))
        size = sum(size for _, size, _ in blocks)
        for _, of_one, path in sorted(blocks):
            if size <= self._limit * 15 // 16:
                return
            self._delete(path)
            size -= of_one

    @staticmethod
    def _delete(path: Path) -> None:
        with suppress(OSError):  # it is gone, or another user's
            path.unlink()
