"""Data sets of the Hugging Face hub, and local copies of them, by its library `datasets`."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.datasets.files import DataFile, Entry, described
from meshwright.datasets.filters import Document, NoDocumentError
from meshwright.datasets.rows import (
    Documents,
    IndexedDocuments,
    Item,
    Reader,
    ToDocument,
    row_reader,
)
from meshwright.system.errors import PASSED_ON, ConfigError, StorageError, first_line
from meshwright.system.files import may_pass


class StreamedRows:
    """Rows of a Hugging Face `IterableDataset`, its files dealt out to shards."""

    def __init__(self, rows: Any, entry: Entry, to_document: ToDocument) -> None:
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self.max_shards = self.parts = rows.num_shards

    def read_part(self, number: int) -> Iterator[Item]:
        return self.read(number, self.parts)

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        rows = self._rows.shard(num_shards, shard)
        if state is not None:
            rows.load_state_dict(copy.deepcopy(state))
        return _RowReader(rows, self._entry, self._to_document, begun=state)


class _RowReader:
    def __init__(self, rows: Any, entry: Entry, to_document: ToDocument, *, begun: Any) -> None:
        """
        Args:
            begun: the state that `rows` has loaded; None: it is at its beginning.
        """
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self._iterator, self._count, self._begun = iter(rows), 0, begun

    @property
    def state(self) -> Any:
        # up to the first row `datasets` gives the state of the beginning, whatever it has loaded
        if self._count == 0 and self._begun is not None:
            return self._begun
        return self._rows.state_dict()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with openable(self._entry):
            row = next(self._iterator, None)
        if row is None:
            raise StopIteration
        self._count += 1
        try:
            return self._to_document(row)
        except NoDocumentError as error:
            return error.of(self._entry, f"row {self._count} since the start")


def load_rows(entry: Entry, streamed: bool, path: str, **options: Any) -> Documents:
    """`datasets.load_dataset`, with its failures as ours."""
    import datasets  # here, because it takes a second that other sources need not wait for

    datasets.disable_progress_bars()
    to_document = row_reader(entry)
    with openable(entry):
        rows = datasets.load_dataset(path, streaming=streamed, **options)
        columns = rows.column_names or list(next(iter(rows), {}))
    column = entry.source.dataset_column
    if columns and not entry.source.dataset_format and column not in columns:
        raise entry.error("dataset_column", "no such column", f"choose from {', '.join(columns)}")
    if streamed:
        return StreamedRows(rows, entry, to_document)

    def get(index: int) -> Document:
        with openable(entry):
            row = rows[index]
        try:
            return to_document(row)
        except NoDocumentError as error:
            raise error.of(entry, f"row {index}") from error

    return IndexedDocuments(len(rows), get)


def hub_files(repository: str, subset: str, entry: Entry) -> list[DataFile]:
    """Addresses, with the revision, of the files of one split; or paths of a local copy."""
    path = entry.source.dataset_path
    if path:
        found = sorted(str(p) for p in Path(path).rglob("*") if p.is_file()) or [path]
        return [described(file) for file in found]
    import datasets  # here, because it takes a second that other sources need not wait for

    with openable(entry):
        revision = entry.source.dataset_revision or None
        builder = datasets.load_dataset_builder(
            repository, subset_of(entry, subset), revision=revision
        )
        found = builder.config.data_files[entry.source.dataset_split]
        return [DataFile(str(file)) for file in found]


def subset_of(entry: Entry, usual: str) -> str | None:
    return entry.source.dataset_subset or usual or None


@contextmanager
def openable(entry: Entry) -> Iterator[None]:
    """Whatever a reader or network client of `datasets` raises becomes a `ConfigError`; or a
    `StorageError`, which a scheduler starts again, if it may pass."""
    key = "dataset_path" if entry.source.dataset_path else "dataset"
    try:
        yield
    except (ConfigError, *PASSED_ON):
        raise
    except BaseException as error:
        if may_pass(error):
            fix = "run the same command again when the network or the file system answers"
            raise StorageError(
                str(entry.error(key, f"cannot be read now: {_reason(error)}", fix))
            ) from error
        raise entry.error(key, f"cannot be opened: {_reason(error)}") from error


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
    return first_line(error)
