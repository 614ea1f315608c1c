"""Which rows of a source are wanted: by a column, by length, by chance for validation."""

import ast
import hashlib
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.datasets.files import Entry
from meshwright.datasets.readers import Row
from meshwright.system.errors import RecordError, config_error, shortened

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
