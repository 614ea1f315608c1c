"""Which files a source consists of, and how each is opened."""

import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from meshwright.system.log import logger


@dataclass(frozen=True)
class DataFile:
    """A file as it was when the job looked for it."""

    path: str
    """Or an address."""
    size: int = -1
    """Bytes; -1: unknown, of a file on the hub."""
    changed: int = 0
    """Time of its last change in nanoseconds, or 0."""


class ChangedError(OSError):
    """A file is not as it was when the job started."""


def open_file(file: DataFile) -> IO[bytes]:
    """Open a file for reading and seeking.

    Raises:
        ChangedError: if it is gone, or has another size than when the job looked for it.
        OSError: if it cannot be read now.
    """
    try:
        opened = open(file.path, "rb")  # noqa: SIM115  the caller closes it
    except FileNotFoundError as error:
        raise ChangedError(f"{file.path}: has gone since the job started") from error
    size = os.fstat(opened.fileno()).st_size
    if size != file.size:
        opened.close()
        raise ChangedError(f"{file.path}: had {file.size} bytes at the start, and has {size} now")
    return opened


def resolve(path: str, suffixes: Sequence[str]) -> list[DataFile]:
    """Return the file `path`, the files below the folder `path`, or the files that fit the glob.

    A path that exists is taken as it is, even with a `*` in it. Links are followed. Below a folder,
    names that begin with `.` or `_` are left out, as are Arrow's own `cache-*.arrow`.

    Args:
        path: a file, a folder or a glob, in which `**` stands for any number of folders.
        suffixes: of the files wanted below a folder.

    Returns:
        The files in the order of their paths; an empty list if there are none.
    """
    if os.path.isdir(path):
        found = [file for file in _below(path) if file.endswith(tuple(suffixes))]
    elif os.path.exists(path):
        found = [path]
    else:
        literal = path  # as much of it as is there, even if it reads as a pattern
        while literal and not os.path.exists(literal):
            literal = os.path.dirname(literal)
        pattern = path[len(literal) :].lstrip("/")
        if "**" in pattern.split("/"):
            wanted = pattern.split("/")
            names = ((file, os.path.relpath(file, literal or ".")) for file in _below(literal))
            found = [file for file, name in names if _fits(name.split("/"), wanted)]
        else:
            found = glob.glob(os.path.join(glob.escape(literal), pattern))
            found = [file for file in found if not _is_left_out(file, os.path.basename(pattern))]
    return [described(file) for file in sorted(found) if os.path.isfile(file)]


def described(path: str) -> DataFile:
    """Return a local file as it is now."""
    stat = os.stat(path)
    return DataFile(path, stat.st_size, stat.st_mtime_ns)


def _below(folder: str) -> Iterator[str]:
    """Yield the files below a folder; a folder that links lead to again is read once."""
    seen = set[tuple[int, int]]()
    for parent, folders, names in os.walk(folder or ".", followlinks=True):
        stat = os.stat(parent)
        if (stat.st_dev, stat.st_ino) in seen:
            logger.warning("%s: a link to a folder that is read already; left out", parent)
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        parent = parent if folder else os.path.relpath(parent)
        yield from (os.path.join(parent, name) for name in names if not _is_left_out(name))


def _is_left_out(path: str, pattern: str = "") -> bool:
    """Return whether a file holds no data, unless the pattern names its beginning."""
    name = os.path.basename(path)
    if name.startswith("cache-") and name.endswith(".arrow"):
        return not pattern.startswith("cache-")
    return name[0] in "._" and pattern[:1] != name[0]


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path fit the parts of a pattern with `**`."""
    if not pattern or not names:
        return not names and not any(part != "**" for part in pattern)
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or _fits(names[1:], pattern)
    return fnmatch.fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])
