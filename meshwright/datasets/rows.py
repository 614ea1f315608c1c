"""From rows of a table to documents."""

import json
import os
from collections.abc import Callable
from typing import Any, TypeGuard

from meshwright.datasets.documents import Document, Entry, Messages
from meshwright.system.errors import PASSED_ON, where_it_ends
from meshwright.system.modules import import_user_module

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


ToDocument = Callable[[dict[str, Any], str], Document]
"""From a row, and how to call it in an error."""


def row_reader(entry: Entry) -> ToDocument:
    """Return how the rows of `entry` become documents: by its function, or its column.

    Raises:
        ConfigError: if the function cannot be found.
    """
    column, format_name = entry.source.dataset_column, entry.source.dataset_format
    key = "dataset_format" if format_name else "dataset_column"
    function = _load_function(entry) if format_name else None

    def to_document(row: dict[str, Any], which: str) -> Document:
        try:
            document = function(row) if function else row[column]
        except PASSED_ON:
            raise
        except BaseException as error:  # whatever the user's function raises
            raise entry.record_error(key, f"{which}: {type(error).__name__}: {error}") from error
        if not is_document(document):
            raise entry.record_error(key, f"{which} holds {no_document(document)}")
        return document

    return to_document


def is_document(value: object) -> TypeGuard[Document]:
    """Return whether it is a text or a conversation."""
    return isinstance(value, str) or _are_messages(value)


def no_document(value: object) -> str:
    """Return the words for a value that is no document."""
    return f"{shortened(value)}, which is neither text nor a list of {{role, content}}"


def line_reader(entry: Entry) -> ToDocument:
    """Return the same of lines of JSON: each a row whose only column, "text", holds an object.

    A line that is no JSON is a bad record; a reader of whole files would fail with all of them.
    """
    to_document = row_reader(entry)

    def from_line(line: dict[str, Any], which: str) -> Document:
        if not line["text"].strip():
            return ""
        try:
            row = json.loads(line["text"])
        except (ValueError, RecursionError) as error:
            raise entry.record_error("dataset_path", f"{which} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise entry.record_error("dataset_path", f"{which} is no object: {shortened(row)}")
        return to_document(row, which)

    return from_line


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in value
    )


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


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
