"""Finds the file at fault, and the line, where `datasets` does not name it."""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import IO, Any

from meshwright.datasets.entry import Entry
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
                if column not in row:
                    return f"{place}: no column {column!r}, but {', '.join(row) or 'none'}"
                if not is_document(row[column]):
                    return f"{place}: {column!r} holds {no_document(row[column])}"
        except _Fault as fault:
            return str(fault)
    for path, names in columns.items():  # `datasets` wants the first file's columns in every file
        first = next(iter(columns))
        if names != columns[first]:
            only = ", ".join(sorted(names ^ columns[first]))
            return f"{path}: has other columns than {first}: {only}"
    return ""


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
