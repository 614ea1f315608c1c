"""Documents made of rows: by a column or a function; and which rows are wanted."""

import ast
import hashlib
import json
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from meshwright.datasets.files import Entry
from meshwright.datasets.readers import Row
from meshwright.system.errors import (
    PASSED_ON,
    RecordError,
    config_error,
    did_you_mean,
    shortened,
    where_it_ends,
)
from meshwright.system.modules import import_user_module, line_of

Messages = list[dict[str, str]]

Document = str | Messages
"""A text, or a conversation. An empty text is no document."""


class NoDocumentError(ValueError):
    """A row holds no document.

    Args:
        key: of the source, that has it read so.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self._key = key

    def of(self, entry: Entry, place: str) -> RecordError:
        """Return the error of a row at a place."""
        return entry.record_error(self._key, f"{place}: {self}")


def is_on_side(entry: Entry, document: Document) -> bool:
    """Return whether a document is of the part of the source that is meant, by its content alone:
    two that are equal are in the same part, whatever their order."""
    content = document if isinstance(document, str) else json.dumps(document)
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
            NoDocumentError: if it has not the column, or another type of value in it.
        """
        found: Any = row
        names = [self.column] if self.column in row else self.column.split(".")
        for name in names:
            if not isinstance(found, dict) or name not in found:
                reason = f"no column {self.column!r}, but {', '.join(row) or 'none'}"
                raise NoDocumentError("dataset_where", reason)
            found = found[name]
        try:
            found = len(found) if self.is_length else found
            return bool(SIGNS[self.sign](found, self.value))
        except TypeError as error:
            what = f"{self.column!r} is {shortened(found)}: {error}"
            raise NoDocumentError("dataset_where", what) from error


def conditions(entry: Entry) -> list[Condition]:
    """Return the conditions of `dataset_where`.

    Raises:
        ConfigError: if one cannot be read.
    """
    found = []
    for number, text in enumerate(entry.source.dataset_where):
        key = f"{entry.key}.dataset_where.{number}"
        rule = "must be a column, or len(column), then ==, !=, <, <=, > or >=, then a value"
        fix = """write it like "language == 'en'", "score >= 3" or "len(text) > 200\""""
        if not (match := CONDITION.fullmatch(text)):
            raise config_error(key, text, rule, fix)
        names = {"true": True, "false": False, "null": None}
        value = match["value"].strip()
        try:
            value = names[value] if value in names else ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise config_error(key, text, f"{value} is no value", fix) from error
        column = (match["sized"] or match["column"]).strip()
        found.append(Condition(column, bool(match["sized"]), match["sign"], value))
    return found


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
                line = line_of(error, format_name.rpartition(":")[0])
                what = f"{type(error).__name__}: {error}{line}; the row has {', '.join(row)}"
                raise NoDocumentError(key, what) from error
        if not is_document(document):
            holds = "the function returns" if function else f"{column!r} holds"
            found = "null" if document is None else shortened(document)
            what = "which is neither text nor a list of {role, content}"
            raise NoDocumentError(key, f"{holds} {found}, {what}")
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
        module = import_user_module(place)
        function = getattr(module, attribute, None)
    except PASSED_ON:
        raise
    except BaseException as error:  # importing runs the user's code
        formats = ", ".join(f'"{name}"' for name in FORMATS)
        fix = f'write "package.module:function" or "path/to/file.py:function", or {formats}'
        if place.endswith(".py") and not os.path.exists(place):
            fix = where_it_ends(place)
        message = f"cannot be imported: {type(error).__name__}: {error}{line_of(error, place)}"
        raise entry.error("dataset_format", message, fix) from error
    if function is None:
        names = [name for name, value in vars(module).items() if callable(value)]
        raise entry.error("dataset_format", f"has no {attribute}", did_you_mean(attribute, names))
    if not callable(function):
        raise entry.error("dataset_format", f"is a {type(function).__name__}, not a function")
    return function
