"""Finds the file at fault, and the line, where `datasets` does not name it."""

import codecs
import gzip
import io
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from meshwright.datasets.documents import Entry
from meshwright.datasets.rows import is_document, no_document, shortened

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Each with its place: `path:line`, or `path, row n`."""


class _Fault(Exception):  # noqa: N818  found, not made
    """A fault of a file, with its place."""


def find_fault(entry: Entry, files: Sequence[str]) -> str:
    """Read `files` again until one is at fault.

    Args:
        entry: a source of local files, which says of which kind they are.

    Returns:
        The fault, beginning with its place; "" if there is none, or no files.
    """
    column, has_function = entry.source.dataset_column, bool(entry.source.dataset_format)
    columns: dict[str, set[str]] = {}
    for path in files:
        try:
            for place, row in READERS[entry.source.dataset](path):
                columns.setdefault(path, set()).update(row)
                if has_function:
                    continue
                if fault := _fault_of(row, column):
                    return f"{place}: {fault}"
        except _Fault as fault:
            return str(fault)
    for path, names in columns.items():  # `datasets` wants the first file's columns in every file
        first = next(iter(columns))
        if names != columns[first]:
            only = ", ".join(sorted(names ^ columns[first]))
            return f"{path}: has other columns than {first}: {only}"
    return ""


MOST_HEADS = 64


HEAD_BYTES = 1 << 16


LINES = re.compile(r"\.jsonl(\.gz|\.zst)?$")


def find_head_fault(entry: Entry, files: Sequence[str]) -> str:
    """Look at the beginning of some of `files`, evenly spread: at the first row, or at the columns.

    Returns:
        As `find_fault`.
    """
    look = HEADS.get(entry.source.dataset)
    if look is None:
        return ""
    column = "" if entry.source.dataset_format else entry.source.dataset_column
    path = files[0]
    try:
        if not any(map(os.path.getsize, files)):
            return f"{files[0]}: is empty"
        for path in files[:: -(-len(files) // MOST_HEADS)]:
            if os.path.getsize(path):  # an empty one adds nothing to others
                look(path, column)
    except (OSError, struct.error) as error:
        return f"{path}: {getattr(error, 'strerror', None) or 'not a whole file'}"
    except _Fault as fault:
        return str(fault)
    return ""


def _fault_of(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return f"no column {column!r}, but {', '.join(row) or 'none'}"
    return "" if is_document(row[column]) else f"{column!r} holds {no_document(row[column])}"


def _look_at_text(path: str, column: str) -> None:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    try:  # a character may be cut at the end
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        line = head.count(b"\n", 0, error.start)
        place = f"{path}:{line + 1}"
        _decoded(head.split(b"\n")[line], place)


def _look_at_json(path: str, column: str) -> None:
    """Of a file that is one value in several lines, see no more than its first character."""
    try:
        with _opened(path) as file:
            head = file.read(HEAD_BYTES)
    except ImportError as error:
        raise _Fault(f"{path}: needs a package: pip install {error.name}") from error
    except Exception as error:  # of three libraries for compressed files
        raise _Fault(f"{path}: cannot be read: {error}") from error
    lines = head.removeprefix(codecs.BOM_UTF8).split(b"\n")
    number = next((n for n, line in enumerate(lines, 1) if line.strip()), 0)
    if number == 0:
        return
    line, place = lines[number - 1], f"{path}:{number}"
    if len(head) == HEAD_BYTES and number == len(lines):  # the row is longer
        return
    try:
        row = json.loads(_decoded(line, place))
    except RecursionError as error:
        raise _Fault(f"{place}: nested too deeply") from error
    except json.JSONDecodeError as error:
        if LINES.search(path) or line.lstrip()[:1] not in (b"{", b"["):
            message = f"{place}: not JSON: {error.msg}, character {error.pos + 1}"
            raise _Fault(message) from error
        return
    if not isinstance(row, dict):
        if isinstance(row, list) and not LINES.search(path):
            return
        raise _Fault(f"{place}: not a JSON object, but {shortened(row)}")
    if column and (fault := _fault_of(row, column)):
        raise _Fault(f"{place}: {fault}")


def _look_at_parquet(path: str, column: str) -> None:
    """Read the footer without pyarrow, which takes a tenth of a second to import: names of columns
    stand there behind their lengths."""
    with open(path, "rb") as file:
        begins = file.read(4) == b"PAR1"
        file.seek(max(file.seek(0, os.SEEK_END) - 8, 0))
        end = file.read(8)
        if not begins or end[4:] != b"PAR1":
            raise _Fault(f"{path}: not a whole Parquet file")
        file.seek(-8 - struct.unpack("<I", end[:4])[0], os.SEEK_END)
        footer = file.read()
    name = column.encode()
    if column and len(name) < 128 and bytes([len(name)]) + name not in footer:
        raise _Fault(f"{path}: no column {column!r}")


def _look_at_arrow(path: str, column: str) -> None:
    """As of Parquet: the schema is the first message."""
    with open(path, "rb") as file:
        head = file.read(16)
        at = 8 if head.startswith(b"ARROW1") else 0
        if head[at : at + 4] != b"\xff\xff\xff\xff":
            raise _Fault(f"{path}: not an Arrow file")
        file.seek(at + 8)
        schema = file.read(struct.unpack("<I", head[at + 4 : at + 8])[0])
    name = column.encode()
    if column and struct.pack("<I", len(name)) + name + b"\0" not in schema:
        raise _Fault(f"{path}: no column {column!r}")


HEADS: dict[str, Callable[[str, str], None]] = {
    "text": _look_at_text,
    "json": _look_at_json,
    "parquet": _look_at_parquet,
    "arrow": _look_at_arrow,
}


def has_lines(path: str) -> bool:
    """Return whether a JSON file holds a record per line, by its first line that is not empty."""
    with suppress(ValueError, RecursionError, _Fault):
        first = next((line for line in _lines(path) if line.strip()), b"")
        return first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    return False


def _of_text(path: str) -> Rows:
    for number, line in enumerate(_lines(path), 1):
        yield f"{path}:{number}", {"text": _decoded(line, f"{path}:{number}")}


def _of_json(path: str) -> Rows:
    """Lines; a file that is one JSON value in several lines, or a list, has none that we name."""
    for number, line in enumerate(_lines(path), 1):
        place = f"{path}:{number}"
        text = _decoded(line, place)
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except RecursionError as error:
            raise _Fault(f"{place}: nested too deeply") from error
        except json.JSONDecodeError as error:
            if number == 1 and _is_one_value(path):
                return
            raise _Fault(f"{place}: not JSON: {error.msg}, character {error.pos + 1}") from error
        if not isinstance(row, dict):
            if number == 1 and isinstance(row, list):
                return
            raise _Fault(f"{place}: not a JSON object, but {shortened(row)}")
        yield place, row


def _is_one_value(path: str) -> bool:
    try:
        json.loads(b"".join(_lines(path)))
    except ValueError:
        return False
    return True


def _lines(path: str) -> Iterator[bytes]:
    try:
        with _opened(path) as file:
            yield from file
    except ImportError as error:
        raise _Fault(f"{path}: needs a package: pip install {error.name}") from error
    except Exception as error:  # of three libraries for compressed files
        raise _Fault(f"{path}: cannot be read: {error}") from error


def _opened(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.open(path)  # type: ignore[return-value]
    if path.endswith(".zst"):
        import zstandard  # optional: `datasets` reads such files with it

        return io.BufferedReader(zstandard.open(path))
    return open(path, "rb")


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1}, 0x{line[error.start]:02x}"
        raise _Fault(f"{place}: not UTF-8: {byte}: {error.reason}") from error


def _of_tables(open_batches: Callable[[str], Iterator[Any]]) -> Callable[[str], Rows]:
    def rows(path: str) -> Rows:
        number = 0
        try:
            for batch in open_batches(path):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
        except (OSError, ValueError) as error:  # pyarrow's are of these
            raise _Fault(f"{path}: {str(error).splitlines()[0]}") from error

    return rows


def _parquet_batches(path: str) -> Iterator[Any]:
    import pyarrow.parquet as parquet  # here: it takes a tenth of a second

    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches()


def _arrow_batches(path: str) -> Iterator[Any]:
    import pyarrow as arrow  # as above

    with arrow.memory_map(path) as file:
        try:
            reader = arrow.ipc.open_stream(file)
        except arrow.ArrowInvalid:
            table = arrow.ipc.open_file(file).read_all()
            yield from table.to_batches()
            return
        with closing(reader):
            yield from reader


READERS: dict[str, Callable[[str], Rows]] = {
    "text": _of_text,
    "json": _of_json,
    "parquet": _of_tables(_parquet_batches),
    "arrow": _of_tables(_arrow_batches),
}


MAGIC = 0xFD2FB528


SKIPPABLE = range(0x184D2A50, 0x184D2A60)


RLE, RESERVED = 1, 3
"""Types of blocks: one byte, repeated; none."""


class CutError(Exception):
    """The file ends within a frame, or is none."""


def check_whole(path: str | Path) -> None:
    """Raise `CutError` unless the file holds whole zstd frames and nothing else."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        while file.tell() < size:
            _pass_frame(file)
            if file.tell() > size:
                raise CutError("the file is cut off")
        if not size:
            raise CutError("the file is empty")


def _pass_frame(file: BinaryIO) -> None:
    magic = _number(file, 4)
    if magic in SKIPPABLE:
        file.seek(_number(file, 4), 1)
        return
    if magic != MAGIC:
        raise CutError("not zstd, or damaged")
    descriptor = _number(file, 1)
    is_single, has_checksum = descriptor & 0x20, descriptor & 0x04
    window = 0 if is_single else 1
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    file.seek(window + dictionary + content, 1)
    is_last = False
    while not is_last:
        header = _number(file, 3)
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == RESERVED:
            raise CutError("damaged")
        file.seek(1 if kind == RLE else size, 1)
    file.seek(4 if has_checksum else 0, 1)


def _number(file: BinaryIO, size: int) -> int:
    read = file.read(size)
    if len(read) < size:
        raise CutError("the file is cut off")
    return int.from_bytes(read, "little")
