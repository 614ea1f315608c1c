"""Documents in pieces that can be read again: of local files, and of the Hugging Face hub by its
library `datasets`."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import length_hint
from pathlib import Path
from typing import Any

from meshwright.datasets.documents import (
    Document,
    NoDocumentError,
    ToDocument,
    conditions,
    row_reader,
)
from meshwright.datasets.files import Entry, Place, Range
from meshwright.datasets.readers import (
    Fault,
    Layout,
    Row,
    Rows,
    cut,
    read,
    where,
)
from meshwright.datasets.storage import ChangedError, DataFile, stat
from meshwright.system.errors import (
    PASSED_ON,
    ConfigError,
    RecordError,
    StorageError,
    first_line,
)
from meshwright.system.files import LASTING, may_pass

Item = Document | RecordError
"""A document, or why a record is none."""


class Reader(Iterator[Item]):
    """Iterates over documents, and can be begun again where it is.

    Args:
        state: returns a value that stands, in JSON, for the place before the next document.
    """

    def __init__(self, items: Iterator[Item], state: Callable[[], Any]) -> None:
        self._items, self._state = items, state

    @property
    def state(self) -> Any:
        """The place before the next document."""
        return self._state()

    def __next__(self) -> Item:
        return next(self._items)


class Documents(ABC):
    """Documents that can be read again and again, in pieces. A record that cannot be read is
    yielded as its error, in its place."""

    max_shards: int
    """Most pieces that can be read independently of each other."""

    parts: int
    """Pieces in which they are best tokenised, by one process each."""

    def read_part(self, number: int) -> Iterator[Item]:
        """One of `parts`."""
        return self.read(number, self.parts)

    @abstractmethod
    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        """One of `num_shards` pieces, in its own order, from `state` on."""


class IndexedDocuments(Documents):
    """Documents that can be had by index."""

    def __init__(self, size: int, get: Callable[[int], Document]) -> None:
        self._size, self._get = size, get
        self.max_shards = max(size, 1)
        # some for each process, and none larger than a few hundred MB of tokens
        few = 8 if size < 4096 else 64
        self.parts = max(min(size, few), -(-size // 2**18), 1)

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        begin, end = (self._size * s // num_shards for s in (shard, shard + 1))
        rest = iter(range(begin if state is None else state, end))
        return Reader(map(self._item, rest), lambda: end - length_hint(rest))

    def _item(self, index: int) -> Item:
        try:
            return self._get(index)
        except RecordError as error:
            return error


LEAST_PART, MOST_PART, MANY_PARTS = 1 << 21, 1 << 28, 256
"""Bytes of a part that one process tokenises, and parts that are enough for many cores."""


class LocalDocuments(Documents):
    """Documents of local files, read by `readers.py`."""

    def __init__(self, entry: Entry, files: Sequence[DataFile]) -> None:
        self._entry, self._files, self._layout = entry, files, _layout(entry)
        self._to_document = row_reader(entry)
        self.max_shards = len(files)

    @cached_property
    def _ranges(self) -> list[list[Range]]:
        size = sum(file.size for file in self._files) // MANY_PARTS
        try:
            return cut(self._files, self._layout, min(max(size, LEAST_PART), MOST_PART))
        except OSError as error:
            raise unreadable(self._entry, error) from error

    @cached_property
    def parts(self) -> int:  # type: ignore[override]  # it reads heads of files
        return len(self._ranges)

    def read_part(self, number: int) -> Iterator[Item]:
        return self._items(self._ranges[number], [0, None])

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        # in order, the first shards one more
        size, more = divmod(len(self._files), num_shards)
        begin = shard * size + min(shard, more)
        ranges = [Range(file) for file in self._files[begin : begin + size + (shard < more)]]
        at: list[Any] = [state[0], state[1] and Place(*state[1])] if state else [0, None]
        return Reader(self._items(ranges, at), lambda: [at[0], at[1] and list(at[1])])

    def _items(self, ranges: Sequence[Range], at: list[Any]) -> Iterator[Item]:
        """Yield the documents of ranges of files, one after the other.

        Args:
            at: number of the range, and place of the last row that was read there; kept up to date.
        """
        for number, part in enumerate(ranges[at[0] :], at[0]):
            rows = read(part, self._layout, at[1])
            while found := self._next(rows):
                at[1], row = found
                yield self._item(part, at[1], row)
            at[:] = number + 1, None

    def _next(self, rows: Rows) -> tuple[Place, Row | Fault] | None:
        try:
            return next(rows, None)
        except OSError as error:
            raise unreadable(self._entry, error) from error

    def _item(self, part: Range, place: Place, row: Row | Fault) -> Item:
        if isinstance(row, Fault):
            return self._entry.record_error("dataset_path", str(row))
        try:
            return self._to_document(row)
        except NoDocumentError as error:
            return error.of(self._entry, where(part, self._layout, place))


def unreadable(entry: Entry, error: OSError) -> ConfigError | StorageError:
    """Return the error of a file that has changed, or that cannot be read now."""
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ChangedError) or error.errno in LASTING:
        return entry.error("dataset_path", f"cannot be read: {what}", "restore it")
    return _unreadable_now(entry, "dataset_path", what)


def _unreadable_now(entry: Entry, key: str, what: str) -> StorageError:
    """A scheduler starts a job that ends by it again."""
    fix = "run the same command again when the network or the file system answers"
    return StorageError(str(entry.error(key, f"cannot be read now: {what}", fix)))


MOST_HEADS = 64


def head_fault(entry: Entry, files: Sequence[DataFile]) -> RecordError | None:
    """Read the first row of some of `files`, evenly spread, and return the first error."""
    if not any(file.size for file in files):
        return entry.record_error("dataset_path", f"{files[0].path}: is empty")
    heads = files[:: -(-len(files) // MOST_HEADS)]
    documents = LocalDocuments(entry, heads)
    for number in range(len(heads)):
        item = next(documents.read(number, len(heads)), None)
        if isinstance(item, RecordError):
            return item
    return None


def _layout(entry: Entry) -> Layout:
    """Return how the files of a source hold rows, and which columns of them are read."""
    source, columns = entry.source, None
    if not source.dataset_format:
        wanted = [source.dataset_column, *(c.column.partition(".")[0] for c in conditions(entry))]
        columns = tuple(dict.fromkeys(wanted))
    return Layout(source.dataset, columns, source.dataset_separator)


class StreamedRows(Documents):
    """Rows of a Hugging Face `IterableDataset`, its files dealt out to shards."""

    def __init__(self, rows: Any, entry: Entry, to_document: ToDocument) -> None:
        self.rows, self._entry, self._to_document = rows, entry, to_document
        self.max_shards = self.parts = rows.num_shards

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        rows = self.rows.shard(num_shards, shard)
        if state is not None:
            rows.load_state_dict(copy.deepcopy(state))
        count, iterator = 0, iter(rows)

        def items() -> Iterator[Item]:
            nonlocal count
            while (row := self._next(iterator)) is not None:
                count += 1
                try:
                    item: Item = self._to_document(row)
                except NoDocumentError as error:
                    item = error.of(self._entry, f"row {count} since the start")
                yield item

        # up to the first row `datasets` gives the state of the beginning, whatever it has loaded
        return Reader(items(), lambda: rows.state_dict() if count or state is None else state)

    def _next(self, rows: Iterator[Row]) -> Row | None:
        with openable(self._entry):
            return next(rows, None)


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
        return [stat(file) for file in found]
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
            raise _unreadable_now(entry, key, _reason(error)) from error
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
