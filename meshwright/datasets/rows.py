"""Documents: from rows of files, by a column or a function, in pieces that can be read again."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeGuard

from meshwright.datasets.files import DataFile, Entry, Place, Range
from meshwright.datasets.filters import Document, Messages, NoDocumentError, conditions, is_on_side
from meshwright.datasets.readers import (
    Fault,
    Layout,
    Row,
    cut,
    read,
    where,
)
from meshwright.datasets.storage import ChangedError
from meshwright.system.errors import (
    PASSED_ON,
    ConfigError,
    RecordError,
    StorageError,
    shortened,
    where_it_ends,
)
from meshwright.system.files import LASTING
from meshwright.system.modules import import_user_module

Item = Document | RecordError
"""A document, or why a record is none."""


class Reader(Protocol):
    """Iterates over documents, and can be begun again where it is."""

    def __iter__(self) -> Iterator[Item]: ...
    def __next__(self) -> Item: ...

    @property
    def state(self) -> Any:
        """Stands, in JSON, for the place before the next document."""


class Documents(Protocol):
    """Documents that can be read again and again, in pieces. A record that cannot be read is
    yielded as its error, in its place."""

    max_shards: int
    """Most pieces that can be read independently of each other."""

    @property
    def parts(self) -> int:
        """Pieces in which they are best tokenised, by one process each."""

    def read_part(self, number: int) -> Iterator[Item]:
        """One of `parts`."""

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        """One of `num_shards` pieces, in its own order, from `state` on."""


class IndexedDocuments:
    """Documents that can be had by index."""

    def __init__(self, size: int, get: Callable[[int], Document]) -> None:
        self._size, self._get = size, get
        self.max_shards = max(size, 1)
        # some for each process, and none larger than a few hundred MB of tokens
        few = 8 if size < 4096 else 64
        self.parts = max(min(size, few), -(-size // 2**18), 1)

    def read_part(self, number: int) -> Iterator[Item]:
        return self.read(number, self.parts)

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        begin, end = (self._size * s // num_shards for s in (shard, shard + 1))
        return _IndexReader(self._get, begin if state is None else state, end)


class _IndexReader:
    def __init__(self, get: Callable[[int], Document], begin: int, end: int) -> None:
        self._get, self._end, self.state = get, end, begin

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self.state >= self._end:
            raise StopIteration
        self.state += 1
        try:
            return self._get(self.state - 1)
        except RecordError as error:
            return error


LEAST_PART, MOST_PART, MANY_PARTS = 1 << 21, 1 << 28, 256
"""Bytes of a part that one process tokenises, and parts that are enough for many cores."""


class LocalDocuments:
    """Documents of local files, read by `readers.py`."""

    def __init__(self, entry: Entry, files: Sequence[DataFile], layout: Layout) -> None:
        self._entry, self._files, self._layout = entry, files, layout
        self._to_document = row_reader(entry)
        self.max_shards = len(files)

    @cached_property
    def _parts(self) -> list[list[Range]]:
        size = sum(file.size for file in self._files) // MANY_PARTS
        try:
            return cut(self._files, self._layout, min(max(size, LEAST_PART), MOST_PART))
        except OSError as error:
            raise unreadable(self._entry, error) from error

    @property
    def parts(self) -> int:
        return len(self._parts)

    def read_part(self, number: int) -> Iterator[Item]:
        return _LocalReader(self._entry, self._to_document, self._parts[number], self._layout)

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        # in order, the first shards one more
        size, more = divmod(len(self._files), num_shards)
        begin = shard * size + min(shard, more)
        files = self._files[begin : begin + size + (shard < more)]
        ranges = [Range(file) for file in files]
        return _LocalReader(self._entry, self._to_document, ranges, self._layout, state)


class _LocalReader:
    """Documents of ranges of files, one after the other.

    Its state is the number of the range and the place of the last row that was read there.
    """

    def __init__(
        self,
        entry: Entry,
        to_document: "ToDocument",
        ranges: Sequence[Range],
        layout: Layout,
        state: Any = None,
    ) -> None:
        self._entry, self._to_document = entry, to_document
        self._ranges, self._layout = ranges, layout
        self._number: int = state[0] if state else 0
        self._place = Place(*state[1]) if state and state[1] else None
        self._rows: Iterator[tuple[Place, Row | Fault]] | None = None

    @property
    def state(self) -> Any:
        return [self._number, self._place and list(self._place)]

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        while self._number < len(self._ranges):
            part = self._ranges[self._number]
            if self._rows is None:
                self._rows = read(part, self._layout, self._place)
            try:
                found = next(self._rows, None)
            except OSError as error:
                raise unreadable(self._entry, error) from error
            if found is not None:
                self._place, row = found
                return self._item(part, self._place, row)
            self._number, self._place, self._rows = self._number + 1, None, None
        raise StopIteration

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
    fix = "run the same command again when the file system answers"
    return StorageError(str(entry.error("dataset_path", f"cannot be read now: {what}", fix)))


MOST_HEADS = 64


def head_fault(entry: Entry, files: Sequence[DataFile]) -> RecordError | None:
    """Read the first row of some of `files`, evenly spread, and return the first error."""
    if not any(file.size for file in files):
        return entry.record_error("dataset_path", f"{files[0].path}: is empty")
    layout, to_document = local_layout(entry), row_reader(entry)
    for file in files[:: -(-len(files) // MOST_HEADS)]:
        item = next(_LocalReader(entry, to_document, [Range(file)], layout), None)
        if isinstance(item, RecordError):
            return item
    return None


def local_layout(entry: Entry) -> Layout:
    """Return how the files of a source hold rows, and which columns of them are read."""
    source, columns = entry.source, None
    if not source.dataset_format:
        wanted = [source.dataset_column, *(c.column.partition(".")[0] for c in conditions(entry))]
        columns = tuple(dict.fromkeys(wanted))
    return Layout(source.dataset, columns, source.dataset_separator)


ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
"""Speakers as ShareGPT and its like call them, and the roles of chat templates."""


def from_alpaca(row: dict[str, Any]) -> Messages:
    """`instruction`, `input` (may be empty or absent) and `output`; `system`, if there is one."""
    instruction, given = _text(row, "instruction"), row.get("input") or ""
    prompt = f"{instruction}\n\n{given}" if given else instruction
    turns = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    return [
        *turns,
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": _text(row, "output")},
    ]


def from_sharegpt(row: dict[str, Any]) -> Messages:
    """`conversations`: a list of {from: human, gpt or system; value}."""
    turns = []
    for turn in _list(row, "conversations"):
        speaker = turn.get("from")
        if speaker not in ROLES:
            raise ValueError(f"from is {speaker!r}, not one of {', '.join(ROLES)}")
        turns.append({"role": ROLES[speaker], "content": _text(turn, "value")})
    return turns


def from_messages(row: dict[str, Any]) -> Messages:
    """`messages`: a list of {role, content}, as chat interfaces have them."""
    return [
        {"role": _text(turn, "role"), "content": _text(turn, "content")}
        for turn in _list(row, "messages")
    ]


FORMATS: dict[str, Callable[[dict[str, Any]], Messages]] = {
    "alpaca": from_alpaca,
    "sharegpt": from_sharegpt,
    "messages": from_messages,
}
"""By the name that `dataset_format` gives."""


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise ValueError(f"its {key!r} is {row.get(key)!r}, not a text")
    return str(row[key])


def _list(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    turns = row.get(key)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"its {key!r} is no list of tables; it has {', '.join(row)}")
    return turns


FORMAT_NAMES = ", ".join(f'"{name}"' for name in FORMATS)

ToDocument = Callable[[Row], Document]
"""Raises `NoDocumentError`. It gives "" for a row that is to be left out."""


def row_reader(entry: Entry) -> ToDocument:
    """Return how the rows of `entry` become documents: by its function, or its column.

    Raises:
        ConfigError: if the function cannot be found, or a condition cannot be read.
    """
    column, format_name = entry.source.dataset_column, entry.source.dataset_format
    function = _load_function(entry) if format_name else None
    wanted, key = conditions(entry), "dataset_format" if format_name else "dataset_column"

    def to_document(row: Row) -> Document:
        for condition in wanted:
            if not condition.holds(row):
                return ""
        if function is None:
            if column not in row:
                names = ", ".join(row) or "none"
                raise NoDocumentError(key, f"no column {column!r}, but {names}")
            document = row[column]
        else:
            try:
                document = function(row)
            except PASSED_ON:
                raise
            except BaseException as error:  # whatever the user's function raises
                raise NoDocumentError(key, f"{type(error).__name__}: {error}") from error
        if not is_document(document):
            holds = "the function returns" if function else f"{column!r} holds"
            what = "which is neither text nor a list of {role, content}"
            raise NoDocumentError(key, f"{holds} {shortened(document)}, {what}")
        return document if not entry.held_out or is_on_side(entry, document) else ""

    return to_document


def is_document(value: object) -> TypeGuard[Document]:
    """Return whether it is a text or a conversation."""
    return isinstance(value, str) or _are_messages(value)


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in value
    )


def _load_function(entry: Entry) -> Callable[[dict[str, Any]], Any]:
    name = entry.source.dataset_format
    if name in FORMATS:
        return FORMATS[name]
    place, _, attribute = name.rpartition(":")
    try:
        function = getattr(import_user_module(place), attribute)
    except PASSED_ON:
        raise
    except BaseException as error:  # importing runs the user's code
        fix = f'write "package.module:function" or "path/to/file.py:function", or {FORMAT_NAMES}'
        if place.endswith(".py") and not os.path.exists(place):
            fix = where_it_ends(place)
        message = f"cannot be imported: {type(error).__name__}: {error}"
        raise entry.error("dataset_format", message, fix) from error
    if not callable(function):
        raise entry.error("dataset_format", f"is a {type(function).__name__}, not a function")
    return function
