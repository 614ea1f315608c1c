"""Which files a source consists of, and how each is opened."""

import fnmatch
import glob
import gzip
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.config.training import Source
from meshwright.datasets.data_file import DataFile, UnsupportedError, is_address
from meshwright.datasets.ranges import open_file
from meshwright.datasets.storage import find_files, stat, stat_all
from meshwright.system import errors
from meshwright.system.files import LFS_BYTES, LFS_FIX, LFS_POINTER, LFS_RULE, warn_once
from meshwright.system.log import logger
from meshwright.system.retries import may_pass, read_patiently

PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Endings of compressed files, and pyarrow's names of the methods."""


def _packed_or_not(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packed for packed in ("", *PACKED) for suffix in suffixes)


SUFFIXES = {
    "json": _packed_or_not(".json", ".jsonl"),
    "parquet": (".parquet",),
    "text": _packed_or_not(".txt", ".md"),
    "arrow": (".arrow",),
    "megatron": (".bin",),
    "tokens": (".npy", ".bin", ".ds"),
}

ROW_FORMATS = ("json", "parquet", "text", "arrow")
"""Of files that hold rows: names of datasets."""


@dataclass(frozen=True)
class SourceEntry:
    """A source as the config gives it."""

    key: str
    """The table that holds its keys: `training`, or `training.datasets.1`."""
    name: str
    """In metrics."""
    source: Source = field(hash=False)  # it has lists
    held_out: float = 0.0
    """Part of its documents that is kept for validation,"""
    is_held_out: bool = False
    """and whether that part is meant, not the rest."""
    weight: float = 1
    """Its share of the samples of all sources; only the ratio counts."""
    loss_weight: float = 1
    """Factor on the loss of its labels; only the ratio counts."""
    options: str = ""
    """[options.NAME] of its dataset, as JSON; "": the config has none."""
    format_options: str = ""
    """The same of its `dataset_format`."""

    def error(self, key: str, what: str, fix: str = "") -> errors.ConfigError:
        """That `key` of this source is at fault."""
        return errors.config_error(f"{self.key}.{key}", getattr(self.source, key), what, fix)

    def unknown(self, key: str, what: str, fix: str) -> errors.UnknownNameError:
        """That no table has the name that `key` of this source gives."""
        return errors.UnknownNameError(f"{self.key}.{key}", str(self.error(key, what, fix)))

    def record_error(self, key: str, what: str, fix: str = "") -> errors.RecordError:
        """That a record is at fault, as `key` of this source has it read. Its place comes first."""
        name, value = f"{self.key}.{key}", getattr(self.source, key)
        return errors.RecordError(
            name, f"{what} ({name} = {errors.as_toml(value)})" + (fix and f"{errors.FIX}{fix}")
        )


class RowPlace(NamedTuple):
    """Of a row in its file."""

    at: int
    """Byte, before compression; row group of Parquet; batch of Arrow; 0 in a single JSON value."""
    number: int
    """Line since the start of the range; row of the row group, the batch or the JSON list."""


class Range(NamedTuple):
    """Rows of a file that start in a part of it."""

    file: DataFile
    begin: int = 0
    """First byte of lines and text, row group of Parquet, or batch of Arrow."""
    end: int | None = None
    """None: to the end of the file."""


CHUNK = 1 << 18
"""Bytes that are read at once. Of a damaged compressed file, so many before the damage are lost."""


def codec_of(file: DataFile) -> str | None:
    """Return how a file is compressed, by its name; None if it isn't."""
    return PACKED.get(os.path.splitext(file.path)[1])


def chunks(file: DataFile, at: int = 0) -> Iterator[bytes]:
    """Yield the content of a file from a byte on, decompressed if its name says so. Compressed ones
    are read from their start, always by the same pieces: where the error of a damaged file
    comes doesn't depend on the place.

    Raises:
        UnsupportedError: if it is whole, but compressed in a way that can't be read here.
        OSError, ValueError, EOFError: if it is damaged.
    """
    codec = codec_of(file)
    with open_file(file) as opened:
        stream: Any = opened
        if codec is None:
            opened.seek(at)
            at = 0
        elif codec == "gzip":  # pyarrow's takes zeros behind the last member for damage
            stream = gzip.GzipFile(fileobj=opened)
        else:
            import pyarrow  # here: most files need it not, and it takes long

            stream = pyarrow.input_stream(opened, compression=codec)
        try:
            while chunk := stream.read(CHUNK):
                if at < len(chunk):
                    yield chunk[at:]
                at = max(at - len(chunk), 0)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        except OSError as error:
            whole = os.path.splitext(file.path)[0]
            if codec == "zstd" and "too much memory" in str(error):
                raise UnsupportedError(
                    f"{file.path}: is made by `zstd --long`, with a window of more than 128 MiB",
                    f"zstd -dc --long=31 {shlex.quote(file.path)} > {shlex.quote(whole)}, "
                    "and name that file",
                ) from error
            raise


def resolve(path: str, suffixes: Sequence[str]) -> list[DataFile]:
    """Return the file `path`, the files below the folder `path`, or the files that fit the glob.

    They come in the order of their paths. In a glob, `**` stands for any number of folders. A path
    that exists is taken as it is, even with a `*` in it. Links are followed. Below a folder, only
    `suffixes` are wanted; names that start with `.` or `_` are left out, as are Arrow's own
    `cache-*.arrow`.
    """
    if is_address(path):
        return stat_all(find_files(path, tuple(suffixes)))
    if os.path.isdir(path):
        paths = [file for file in _below(path) if file.endswith(tuple(suffixes))]
    elif os.path.exists(path):
        paths = [path]
    else:
        literal = path  # as much of it as is there, even if it reads as a pattern
        while literal and not os.path.exists(literal):
            literal = os.path.dirname(literal)
        paths = [*_matches(literal, re.split("/+", path[len(literal) :].lstrip("/")))]
    return [stat(file) for file in sorted(paths) if os.path.isfile(file)]


def beside(path: str, suffix: str) -> str:
    """Return the path, or address, with a different ending."""
    return os.path.splitext(path)[0] + suffix


def _matches(folder: str, pattern: Sequence[str]) -> Iterator[str]:
    """Yield the paths below a folder that fit the parts of a pattern."""
    first, *rest = pattern
    if "**" in pattern:  # one walk, which sees the folders that links lead to twice
        below = ((file, os.path.relpath(file, folder or ".")) for file in _below(folder))
        yield from (file for file, name in below if _fits(name.split("/"), pattern))
        return
    names = [first] if os.path.exists(os.path.join(folder, first)) else []  # it may be ".."
    if glob.has_magic(first):
        _, folders, files = next(os.walk(folder or ".", onerror=_leave_out), ("", [], []))
        names = fnmatch.filter(folders if rest else files, first)
    for name in names:
        path = os.path.join(folder, name)
        if not _is_left_out(name, first):
            yield from _matches(path, rest) if rest else [path]


def _leave_out(error: OSError) -> None:
    """Have a walk leave out a folder that this user may not look into, and no other."""
    if may_pass(error):
        raise error
    warn_once(f"{error.filename}: {error.strerror}; left out")


def _below(folder: str) -> Iterator[str]:
    """Yield the files below a folder; a folder that links lead to again is read once."""
    seen = set[tuple[int, int]]()
    for parent, folders, names in os.walk(folder or ".", followlinks=True, onerror=_leave_out):
        state = os.stat(parent)
        if (state.st_dev, state.st_ino) in seen:
            logger.warning("%s: a link to a folder that is read already; left out", parent)
            folders.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        parent = parent if folder else os.path.relpath(parent)
        yield from (os.path.join(parent, name) for name in names if not _is_left_out(name))


def _is_left_out(name: str, pattern: str = "") -> bool:
    """Return whether a file or folder holds no data, unless the pattern names its start."""
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


def check_downloaded(files: Sequence[DataFile], key: str) -> None:
    """Raise `ConfigError` of `key` if a file is a pointer that Git LFS left in its place. Such a
    file is short, so that only short files are opened."""
    for file in files:
        if not 0 <= file.size < LFS_BYTES:
            continue
        with suppress(OSError), open_file(file) as opened:  # its reader says what is wrong
            if LFS_POINTER.match(opened.read(LFS_BYTES)):
                raise errors.config_error(key, file.path, LFS_RULE, LFS_FIX)


def local_files(entry: SourceEntry) -> list[DataFile]:
    """Return the files of `dataset_path`: itself, files of the right kind below it, or its glob.

    Raises:
        ConfigError: if there are none.
    """
    path, suffixes = entry.source.dataset_path, SUFFIXES[entry.source.dataset]
    files = list[DataFile]()
    if os.path.exists(os.path.join(path, "dataset_dict.json")):  # a test split would be trained on
        fix = f"name one of them, for example {os.path.join(path, 'train')}"
        raise entry.error("dataset_path", "is a DatasetDict with its splits", fix)
    with suppress(FileNotFoundError):  # a web server's answer
        files = read_patiently(path, lambda: resolve(path, suffixes))
    if files:
        for file in files:  # the names decide on the cache, and errors print them
            if file.path.encode("utf-8", "ignore").decode() != file.path:
                raise entry.error("dataset_path", f"{file.path!r} is no name in UTF-8", "rename it")
        check_downloaded(files, f"{entry.key}.dataset_path")
        return files
    wanted = "such file or folder"
    if os.path.isdir(path):
        wanted = f"file ending in {' or '.join(suffixes)}"
    fixed = path  # as much of it as is no pattern
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    fix = f"check the path: {fixed or '.'} holds none; names that start with . or _ are left out"
    if is_address(path):
        fix = "check the address"
    elif not os.path.exists(fixed):
        fix = errors.where_it_ends(fixed)
    raise entry.error("dataset_path", f"no {wanted}", fix)


def token_files(entry: SourceEntry) -> list[DataFile]:
    """Return the files of tokens that `dataset_path` stands for, then the indices next to them."""
    is_megatron, files = entry.source.dataset == "megatron", token_paths(entry)
    indices = list[DataFile]()
    for file in files:
        name = beside(file.path, ".idx") if is_megatron else f"{file.path}.index"
        if is_megatron or file.path.endswith(".ds"):
            try:
                indices.append(stat(name))
            except FileNotFoundError:
                if is_megatron:
                    raise entry.error("dataset_path", f"there is no {name}") from None
    check_downloaded([*files, *indices], f"{entry.key}.dataset_path")
    return [*files, *indices]


def token_paths(entry: SourceEntry) -> list[DataFile]:
    """Return the files of tokens that `dataset_path` stands for."""
    path = entry.source.dataset_path
    if entry.source.dataset != "megatron":
        return local_files(entry)
    with suppress(FileNotFoundError, errors.ConfigError):
        return [stat(f"{path}.bin")]  # Megatron names both files without their endings
    if path.endswith((".bin", ".idx")):
        with suppress(FileNotFoundError):
            return [stat(beside(path, ".bin"))]
    return stat_all(sorted({beside(file.path, ".bin") for file in local_files(entry)}))
