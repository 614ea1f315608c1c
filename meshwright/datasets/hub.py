"""Rows that Hugging Face `datasets` reads, as documents; and its errors."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from gzip import BadGzipFile
from http.client import HTTPException
from pathlib import Path
from typing import Any

from meshwright.datasets.documents import Document, Documents, Entry, IndexedDocuments, Reader
from meshwright.datasets.sources.faults import CutError, check_whole, find_fault
from meshwright.datasets.rows import ToDocument, row_reader
from meshwright.system.errors import PASSED_ON, ConfigError, RecordError

NETWORK_CLIENTS = {"aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "requests", "urllib3"}


STAYS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, BadGzipFile)
"""Errors of the operating system that another attempt does not mend."""


def may_pass(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is one of a network or a file system that may be gone
    later."""
    while error is not None and not isinstance(error, STAYS):
        is_of_network = type(error).__module__.partition(".")[0] in NETWORK_CLIENTS
        if is_of_network or isinstance(error, (OSError, HTTPException)):
            return True
        error = error.__cause__
    return False


class StreamedRows:
    """Rows of a Hugging Face `IterableDataset`, its files dealt out to shards."""

    def __init__(
        self, rows: Any, entry: Entry, to_document: ToDocument, files: Sequence[str]
    ) -> None:
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self.max_shards = self.parts = rows.num_shards
        self._files = files

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        rows = self._rows.shard(num_shards, shard)
        if state is not None:
            rows.load_state_dict(copy.deepcopy(state))
        # as `datasets` deals them out: in order, the first shards one more
        size, more = divmod(len(self._files), num_shards)
        begin = shard * size + min(shard, more)
        files = self._files[begin : begin + size + (shard < more)]
        return _RowReader(rows, self._entry, self._to_document, files, begun=state)


class _RowReader:
    def __init__(
        self,
        rows: Any,
        entry: Entry,
        to_document: ToDocument,
        files: Sequence[str],
        *,
        begun: Any,
    ) -> None:
        """
        Args:
            begun: the state that `rows` has loaded; None: it is at its beginning.
        """
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self._iterator, self._count, self._files = iter(rows), 0, files
        self._begun = begun
        # files are searched for the first bad record: others cannot be told from it
        self._is_first_bad = begun is None and not entry.source.dataset_format
        self._num_checked: int | None = None

    @property
    def state(self) -> Any:
        state = self._state()
        number = _file_number(state)
        if self._num_checked is None:  # of a resume, files before this one are read no more
            self._num_checked = max(number - 1, 0)
        self._check_files(number + 2)  # rows are read ahead
        return state

    def _state(self) -> Any:
        # up to the first row `datasets` gives the state of the beginning, whatever it has loaded
        if self._count == 0 and self._begun is not None:
            return self._begun
        return self._rows.state_dict()

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        with openable(self._entry, self._near_files):
            row = next(self._iterator, None)
        if row is None:
            self._check_files(len(self._files))
            raise StopIteration
        self._count += 1
        try:
            return self._to_document(row, f"row {self._count} since the start")
        except RecordError as error:
            fault = find_fault(self._entry, self._near_files()) if self._is_first_bad else ""
            self._is_first_bad = False
            key = error.key.rpartition(".")[2]
            raise (self._entry.record_error(key, fault) if fault else error) from error

    def _check_files(self, end: int) -> None:
        """Check the files before number `end` that were not checked yet."""
        begin = self._num_checked or 0
        check_files(self._entry, self._files[begin:end])
        self._num_checked = max(begin, end)

    def _near_files(self) -> Sequence[str]:
        """Return the file that is being read and its neighbours: rows are read ahead."""
        number = _file_number(self._state())
        return self._files[max(number - 1, 0) : number + 2]


def check_files(entry: Entry, files: Sequence[str]) -> None:
    """Raise `ConfigError` if one of these files was cut off, and its format does not show that."""
    for file in files:
        if file.endswith(".zst"):
            try:
                check_whole(file)
            except CutError as error:
                raise entry.error("dataset_path", f"{file}: cannot be read: {error}") from error


def _file_number(state: Any) -> int:
    """Return the file that a state of `datasets` is in, among the shard's; 0 if it says none."""
    while "shard_idx" not in state:
        state = state.get("examples_iterable")
        if not isinstance(state, dict):
            return 0
    return int(state["shard_idx"])


def load_rows(
    entry: Entry,
    streamed: bool,
    path: str,
    files: Sequence[str] = (),
    from_line: ToDocument | None = None,
    **options: Any,
) -> Documents:
    """`datasets.load_dataset`, with its failures as ours.

    Args:
        files: local ones that it reads, in order, to find one that is at fault.
        from_line: makes documents of lines that `path` reads as rows.
    """
    import datasets  # here, because it takes a second that other sources need not wait for

    datasets.disable_progress_bars()
    to_document = row_reader(entry)
    with openable(entry, lambda: files):
        rows = datasets.load_dataset(path, streaming=streamed, **options)
        columns = None if from_line else rows.column_names
        if not columns:
            first: dict[str, Any] = next(iter(rows), {})
            columns = _columns_in(first) if from_line else list(first)
    column = entry.source.dataset_column
    if columns and not entry.source.dataset_format and column not in columns:
        fault = find_fault(entry, files[:1]) or "no such column"
        raise entry.error("dataset_column", fault, f"choose from {', '.join(columns)}")
    if streamed:
        return StreamedRows(rows, entry, from_line or to_document, files)

    def get(index: int) -> Document:
        with openable(entry, lambda: files):  # JSON is decoded only now
            return (from_line or to_document)(rows[index], f"row {index}")

    return IndexedDocuments(len(rows), get)


def _columns_in(line: dict[str, str]) -> list[str]:
    """Return the columns of a line of JSON; none if it is no JSON, which shows when it is read."""
    try:
        row = json.loads(line["text"])
    except (KeyError, ValueError, RecursionError):
        return []
    return list(row) if isinstance(row, dict) else []


@contextmanager
def openable(entry: Entry, files: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Whatever a reader or network client of `datasets` raises becomes a `ConfigError`.

    Args:
        files: local ones, in which to look for a fault that the error does not place.
    """
    key = "dataset_path" if entry.source.dataset_path else "dataset"
    try:
        yield
    except ConfigError as error:  # a row that holds no document
        if entry.source.dataset_format:
            raise
        fault = find_fault(entry, files())
        raise entry.error("dataset_column", fault) if fault else error from error
    except PASSED_ON:
        raise
    except BaseException as error:
        fault = find_fault(entry, files())
        raise entry.error(key, f"cannot be opened: {fault or _reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    from datasets.arrow_writer import SchemaInferenceError  # here, as above
    from datasets.config import HF_DATASETS_CACHE

    if isinstance(error, OSError) and Path(HF_DATASETS_CACHE).is_relative_to(str(error.filename)):
        return (
            f"{error.filename}, the cache of Hugging Face: {error.strerror}\n"
            "  fix: set the variable HF_HOME to a folder that you can write to"
        )
    if isinstance(error, StopIteration | SchemaInferenceError):
        return "there is nothing in it"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
