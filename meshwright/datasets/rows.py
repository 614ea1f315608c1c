"""Rows to documents: by a column or a function, those that are wanted, in pieces that can be read
again."""

import ast
import hashlib
import json
import operator
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.config.own_options import options_of
from meshwright.datasets.conversations import (
    BESIDE,
    FORMATS,
    MEANT,
    Conversation,
    Document,
    Format,
    as_document,
    from_messages,
    is_list_of_tables,
    unused_columns,
    without_nulls,
)
from meshwright.datasets.data_file import ChangedError, DataFile, UnsupportedError
from meshwright.datasets.files import Range, RowPlace, SourceEntry
from meshwright.datasets.readers import Layout, cut, read
from meshwright.datasets.tables import Row
from meshwright.system import errors
from meshwright.system.modules import describe_error, file_of, import_user_module
from meshwright.system.retries import may_pass

AGAIN = "run the same command again when the network or the file system answers"


def is_on_side(entry: SourceEntry, document: Document) -> bool:
    """Return whether a document is of the part that is meant, by its content, not its place."""
    if not entry.held_out:
        return True
    content = document if isinstance(document, str) else json.dumps(document.messages, default=str)
    digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") < entry.held_out * 2**64) == entry.is_held_out


CONDITION = re.compile(
    r"\s*(?:len\((?P<sized>[^()]+)\)|(?P<column>[^()<>=!]+?))\s*(?P<sign>[=!<>]=|<|>)\s*(?P<value>.+)"
)

SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """A rule for rows: a column, or its length, compared with a value."""

    column: str
    """Or columns of columns: `meta.language`."""
    is_length: bool
    sign: str
    value: Any

    def holds(self, row: Row) -> bool:
        """Return whether the row is wanted.

        Raises:
            ValueError: if it hasn't the column, or a different type of value in it.
        """
        actual: Any = row
        names = [self.column] if self.column in row else self.column.split(".")
        for name in names:
            if not isinstance(actual, dict) or name not in actual:
                raise ValueError(f"no column {self.column!r}, but {', '.join(row) or 'none'}")
            actual = actual[name]
        try:
            actual = len(actual) if self.is_length else actual
            return bool(SIGNS[self.sign](actual, self.value))
        except TypeError as error:
            raise ValueError(f"{self.column!r} is {errors.shortened(actual)}: {error}") from error


def conditions(entry: SourceEntry) -> list[Condition]:
    """Return the conditions of `dataset_where`.

    Raises:
        ConfigError: if one can't be read.
    """
    parsed = []
    for number, text in enumerate(entry.source.dataset_where):
        key = f"{entry.key}.dataset_where.{number}"
        rule = "must be a column, or len(column), then ==, !=, <, <=, > or >=, then a value"
        fix = """write it like "language == 'en'", "score >= 3" or "len(text) > 200\""""
        if not (match := CONDITION.fullmatch(text)):
            raise errors.config_error(key, text, rule, fix)
        names = {"true": True, "false": False, "null": None}
        value = match["value"].strip()
        try:
            value = names[value] if value in names else ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise errors.config_error(key, text, f"{value} is no value", fix) from error
        column = (match["sized"] or match["column"]).strip()
        parsed.append(Condition(column, bool(match["sized"]), match["sign"], value))
    return parsed


Item = Document | errors.RecordError
"""A document, or why a record is none."""


class RowReader:
    """Makes documents of the rows of a source: by its function, its format or its column.

    Raises:
        ConfigError: if the function can't be found, or a condition can't be read.
    """

    def __init__(self, entry: SourceEntry) -> None:
        self._entry, self._column = entry, entry.source.dataset_column
        name = entry.source.dataset_format
        known = FORMATS.get(name)
        self._format = known if isinstance(known, Format) else None
        self._function: Callable[..., object] | None = None
        self._options = list[object]()
        if known is not None and not isinstance(known, Format):
            self._function, self._options = known, [options_of(name, entry.format_options)]
        elif name and self._format is None:
            self._function = _load_function(entry)
        self._wanted = conditions(entry)
        self.unused = Counter[str]()
        """Rows that have a column, by its name, which the format doesn't use."""

    def __call__(self, row: Row, place: str) -> Item:
        key = "dataset_where"
        try:
            if not all(condition.holds(row) for condition in self._wanted):
                return ""
            key = "dataset_format" if self._entry.source.dataset_format else "dataset_column"
            document = self._document(row)
            if isinstance(document, Conversation):
                messages, tools = document.messages, document.tools
                if self._entry.source.dataset != "json":  # a table
                    messages, tools = without_nulls(messages), without_nulls(tools)
                document = replace(document, messages=messages, tools=tools, place=place)
            return document if is_on_side(self._entry, document) else ""
        except ValueError as error:
            what, _, fix = str(error).partition(errors.FIX)
            return self._entry.record_error(key, f"{place}: {what}", fix)

    def _document(self, row: Row) -> Document:
        """Return the document of a row.

        Raises:
            ValueError: if it has none, or one that would lose something.
        """
        if self._format is not None:
            self.unused.update(unused_columns(row, self._format.columns))
            return self._format.read(row)
        if self._function is not None:
            return as_document(self._call(row), "the function returns")
        column = self._column
        if column not in row:
            raise ValueError(f"no column {column!r}, but {', '.join(row) or 'none'}")
        if is_list_of_tables(row[column]):
            unused_columns(row, {*BESIDE, column})
            return from_messages(row, column)
        document = as_document(row[column], f"{column!r} holds", f"row[{column!r}]")
        if isinstance(document, Conversation):
            unused_columns(row, {column})
        return document

    def _call(self, row: Row) -> object:
        assert self._function is not None
        try:
            return self._function(row, *self._options)
        except errors.PASSED_ON:
            raise
        except BaseException as error:  # whatever the user's function raises
            what = describe_error(error, file_of(self._function))
            raise ValueError(f"{what}; the row has {', '.join(row)}") from error


def _load_function(entry: SourceEntry) -> Callable[[dict[str, Any]], Any]:
    name = entry.source.dataset_format
    place, _, attribute = name.rpartition(":")
    if not place:
        fix = f'{errors.did_you_mean(name, FORMATS)} (a function is "path/to/file.py:function")'
        raise entry.unknown("dataset_format", "no such format", fix)
    try:
        module = import_user_module(place)
    except errors.PASSED_ON:
        raise
    except BaseException as error:  # importing runs the user's code
        formats = ", ".join(f'"{name}"' for name in FORMATS)
        fix = f'write "package.module:function" or "path/to/file.py:function", or {formats}'
        if place.endswith(".py") and not Path(place).exists():
            fix = errors.where_it_ends(place)
        what = f"cannot be imported: {describe_error(error, place)}"
        raise entry.error("dataset_format", what, fix) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        fix = errors.did_you_mean(attribute, names)
        raise entry.error("dataset_format", f"has no function {attribute}", fix)
    return function


class Reader(Iterator[Item]):
    """Iterates over documents, and can be started again where it is: `state` returns a value that
    stands, in JSON, for the place before the next document."""

    def __init__(self, items: Iterator[Item], state: Callable[[], Any]) -> None:
        self._items, self.state = items, state

    def __next__(self) -> Item:
        return _checked(next(self._items), "a document")


def _checked(item: object, words: str) -> Item:
    """Return a document, or the error of a row that holds none."""
    if isinstance(item, errors.RecordError):
        return item
    try:
        document = as_document(item, f"{words} is")
    except ValueError as error:
        return errors.RecordError("", str(error))
    if isinstance(document, str) or document.place:
        return document
    return replace(document, place=words)


class Documents(ABC):
    """Documents that can be read again and again, in pieces. A record that can't be read is
    yielded as its error, in its place."""

    max_shards: int
    """Most pieces that can be read independently of each other."""

    parts: int
    """Pieces in which they are best tokenized, by one process each."""

    unused: Counter[str]
    """Rows that have a column, by its name, which their format doesn't use."""

    def read_part(self, number: int) -> Iterator[Item]:
        """One of `parts`."""
        return self.read(number, self.parts)

    def placed(self, number: int) -> Iterator[tuple[str, Item]]:
        """Yield the items of one of `parts`, each after words for its place."""
        for index, item in enumerate(self.read_part(number)):
            yield f"document {index} of part {number}", item

    @abstractmethod
    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        """One of `num_shards` pieces, in its own order, from `state` on."""


class IndexedDocuments(Documents):
    """Documents that can be had by index. A row that holds none is a bad record."""

    name = ""  # of the user's dataset, for errors

    def __init__(self, size: int, get: Callable[[int], Item]) -> None:
        self._size, self._get, self.unused = size, get, Counter()
        self.max_shards = max(size, 1)
        # some for each process, and none larger than a few hundred MB of tokens
        self.parts = max(min(size, 8 if size < 4096 else 64), -(-size // 2**18), 1)

    def placed(self, number: int) -> Iterator[tuple[str, Item]]:
        begin = self._size * number // self.parts
        for index, item in enumerate(self.read_part(number), begin):
            yield f"row {index}", item

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        begin, end = (self._size * s // num_shards for s in (shard, shard + 1))
        rest = iter(range(begin if state is None else state, end))
        return Reader(map(self._item, rest), lambda: end - operator.length_hint(rest))

    def _item(self, index: int) -> Item:
        words = f"{self.name} document {index}".lstrip()
        try:
            return _checked(self._get(index), f"{words}:")
        except BaseException as error:  # whatever the user's function raises
            if isinstance(
                error,
                (errors.ConfigError, errors.DataError, errors.StorageError, *errors.PASSED_ON),
            ):
                raise
            what = describe_error(error, file_of(self._get))
            if may_pass(error):
                raise errors.StorageError(
                    f"{words} cannot be read now: {what}\n  fix: {AGAIN}"
                ) from error
            return errors.RecordError("", f"{words}: {what}")


LEAST_PART, MOST_PART, MANY_PARTS = 1 << 21, 1 << 28, 256
"""Bytes of a part that one process tokenizes, and parts that are enough for many cores."""


class LocalDocuments(Documents):
    """Documents of local files, read by `readers.py`."""

    def __init__(self, entry: SourceEntry, files: Sequence[DataFile]) -> None:
        self._entry, self._files, self._layout = entry, files, _layout(entry)
        self._to_item = RowReader(entry)
        self.unused, self.max_shards = self._to_item.unused, len(files)

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
        return (item for _, item in self.placed(number))

    def placed(self, number: int) -> Iterator[tuple[str, Item]]:
        return self._items(self._ranges[number], [0, None])

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        # in order, the first shards one more
        size, more = divmod(len(self._files), num_shards)
        begin = shard * size + min(shard, more)
        ranges = [Range(file) for file in self._files[begin : begin + size + (shard < more)]]
        at: list[Any] = [state[0], state[1] and RowPlace(*state[1])] if state else [0, None]
        items = (item for _, item in self._items(ranges, at))
        return Reader(items, lambda: [at[0], at[1] and list(at[1])])

    def _items(self, ranges: Sequence[Range], at: list[Any]) -> Iterator[tuple[str, Item]]:
        """Yield the documents of ranges of files, one after the other, each after its place.

        Args:
            at: number of the range, and place of the last row that was read there; kept up to date.
        """
        try:
            for number, part in enumerate(ranges[at[0] :], at[0]):
                for place, words, row in read(part, self._layout, at[1]):
                    at[1] = place
                    if isinstance(row, str):
                        yield words, self._entry.record_error("dataset_path", f"{words}: {row}")
                    else:
                        yield words, self._to_item(row, words)
                at[:] = number + 1, None
        except OSError as error:
            raise unreadable(self._entry, error) from error


def unreadable(entry: SourceEntry, error: OSError) -> errors.ConfigError | errors.StorageError:
    """Return the error of a file that has changed, or that can't be read now."""
    if isinstance(error, UnsupportedError):
        return entry.error("dataset_path", str(error), error.fix)
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ChangedError) or not may_pass(error):
        fix = "let this user read it" if isinstance(error, PermissionError) else "restore it"
        return entry.error("dataset_path", f"cannot be read: {what}", fix)
    return unreadable_now(entry, "dataset_path", what)


def unreadable_now(entry: SourceEntry, key: str, what: str) -> errors.StorageError:
    """A scheduler starts a job that ends by it again."""
    return errors.StorageError(str(entry.error(key, f"cannot be read now: {what}", AGAIN)))


def _layout(entry: SourceEntry) -> Layout:
    """Return how the files of a source hold rows, and which columns of them are read."""
    source = entry.source
    columns: tuple[str, ...] | None = None
    beside: tuple[str, ...] = ()
    named = [c.column for c in conditions(entry)]  # "a.b": of that name, or b in a
    named += [name.partition(".")[0] for name in named]
    if isinstance(known := FORMATS.get(source.dataset_format), Format):
        columns = (*known.columns, *MEANT, *named)
    elif not source.dataset_format:
        columns, beside = (source.dataset_column, *named), (*BESIDE, *MEANT)
    return Layout(source.dataset, columns, beside, source.dataset_separator)
