"""Remembers where each value of a config was written, so that errors show file and line."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.config.fields import Key
from meshwright.system.errors import CombinedConfigError, ConfigError, RecordError, UnknownKeyError

HEADER = re.compile(
    r"\s*(?P<brackets>\[\[?)\s*(?P<key>(?:[\w. -]|\"[^\"]*\"|'[^']*')+?)\s*\]\]?\s*(?:#.*)?$"
)

ASSIGNMENT = re.compile(r"\s*(?P<key>[\w.\"' -]+?)\s*=\s*")

VALUE = re.compile(r"""(?:"[^"]*"|'[^']*'|[^#"']|["'].*)*""")
"""As far as a comment, or to the end of a line where a string goes on in the next."""

MOST_COLUMNS = 96


def table_below(header: re.Match[str], counts: Counter[Key]) -> Key:
    """Return the table that a header starts, with the number of each table in a list.

    Args:
        counts: tables of each list so far; this one is added.
    """
    table: Key = ()
    for part in _split(header["key"]):
        within = (str(counts[table] - 1),) if counts[table] else ()
        table = (*table, *within, part)
    if header["brackets"] == "[[":
        counts[table] += 1
        table = (*table, str(counts[table] - 1))
    return table


def _opened(line: str) -> int:
    """Return how many brackets of `line` are still open at its end, negative for closed ones."""
    bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
    return bare.count("[") - bare.count("]")


class Origin(NamedTuple):
    """One place where a key was written."""

    where: str
    """`path/to.toml:12` or `--section.key`."""
    line: str = ""
    """The text there; "" on the command line."""


class Provenance:
    """Where each key was given."""

    def __init__(self) -> None:
        self._origins: dict[Key, Origin] = {}
        self.left_out: dict[str, str] = {}
        """Inherited keys that don't hold, since a model folder is in the place of their model, and
        where each was given."""
        self._outermost = ""
        """The TOML that was added last: the others are the ones below it."""

    def add_toml(self, path: Path, text: str) -> None:
        """Note the line of every table and key in `text`; inline tables count as one key.

        tomli gives no positions. It has accepted `text`, so a look at each line is enough. Only a
        line inside a multi-line string could be misread, if it looks like a key.
        """
        self._outermost = shown_path(path)
        table: Key = ()
        counts, depth = Counter[Key](), 0
        for number, line in enumerate(text.split("\n"), 1):
            is_inside, depth = depth > 0, depth + _opened(line)
            if is_inside:  # a list of several lines
                continue
            origin = Origin(f"{shown_path(path)}:{number}", line)
            if header := HEADER.match(line):
                table = table_below(header, counts)
                if header["brackets"] == "[[" and table[-1] == "0":
                    self.forget(table[:-1])  # the list of a TOML below, which this one replaces
                self._origins[table] = origin
                for length in range(1, len(table)):  # of [tool.ruff], the table "tool"
                    self._origins.setdefault(table[:length], origin)
            elif assignment := ASSIGNMENT.match(line):
                self._origins[table + _split(assignment["key"])] = origin

    def add_override(self, key: Key) -> None:
        """Note that the command line gave `key`."""
        self.forget(key)
        self._origins[key] = Origin(f"--{'.'.join(key)}")

    def forget(self, key: Key) -> None:
        """Forget `key` and the values written inside it."""
        for inner in [inner for inner in self._origins if inner[: len(key)] == key]:
            del self._origins[inner]

    def leave_out(self, key: Key) -> None:
        """Forget `key`, and note where it was given, since it doesn't hold."""
        name = ".".join(key)
        self.left_out[name] = self.of(name)
        self.forget(key)

    def of(self, key: str) -> str:
        """Return where `key`, or else the nearest table around it, was given; "" if nowhere."""
        return self._nearest(key)[1].where

    def origin(self, key: str) -> str:
        """Return where the value of `key`, or a part of it, was given; "default" if nowhere."""
        parts = tuple(key.split("."))
        inside = any(given[: len(parts)] == parts for given in self._origins)
        found, origin = self._nearest(key)
        # an inline table gives everything in it; the header of a table gives nothing
        is_inline = 1 < len(found) < len(parts) and not HEADER.match(origin.line)
        return origin.where if inside or is_inline else "default"

    def is_inherited(self, key: str) -> bool:
        """Return whether a TOML gave `key` that the user's own extends."""
        where = self.origin(key)
        return where.rpartition(":")[0] not in ("", self._outermost)

    def _nearest(self, key: str) -> tuple[Key, Origin]:
        parts = tuple(key.split("."))
        while parts and parts not in self._origins:
            parts = parts[:-1]
        return parts, self._origins.get(parts, Origin(""))

    def _place(self, error: ConfigError) -> tuple[str, int]:
        """Sort key: file and line; keys that weren't written come first."""
        path, _, line = self.of(error.key).rpartition(":")
        return path, int(line) if path else 0

    def explain(self, error: ConfigError) -> str:
        """Return the error's message, headed by where its key was given, with the line and a
        caret."""
        if isinstance(error, CombinedConfigError):
            return "\n".join(map(self.explain, sorted(error.errors, key=self._place)))
        parts, (where, line) = self._nearest(error.key)
        if not where or isinstance(error, RecordError):  # whose place is in the data
            return str(error)
        head, *fixes = str(error).split("\n")
        if where == f"--{error.key}" and head.startswith(error.key):
            return "\n".join([f"--{head}", *fixes])
        pointer = _pointer(line, isinstance(error, UnknownKeyError)) if parts else []
        return "\n".join([f"{where}: {head}", *pointer, *fixes])


def with_comments(toml: str, comments: Mapping[str, str]) -> str:
    """Return `toml` with a comment behind the line of each key that it gives."""
    places, lines = Provenance(), toml.split("\n")
    places.add_toml(Path(), toml)
    for key, comment in comments.items():
        number = int(places.of(key).rpartition(":")[2] or 0) - 1
        assignment = ASSIGNMENT.match(lines[number])
        if assignment and assignment["key"] == key.rpartition(".")[2]:
            lines[number] += f"  # {comment}"
    return "\n".join(lines)


def _pointer(line: str, at_key: bool) -> list[str]:
    """Return the line, and carets under its key or its value; nothing if it is no assignment."""
    header, assignment = HEADER.match(line), ASSIGNMENT.match(line)
    if at_key and (found := header or assignment):
        return underline(line, *found.span("key"))
    if assignment:
        value = VALUE.match(line, assignment.end())
        assert value is not None  # it may be empty
        return underline(line, value.start(), value.start() + len(value[0].rstrip()))
    return []


def underline(line: str, start: int, end: int) -> list[str]:
    """Return `line`, and below it carets from column `start` to `end`."""
    indent = len(line) - len(line.lstrip())
    shown = line.strip().replace("\t", " ")[:MOST_COLUMNS]
    start = min(start - indent, MOST_COLUMNS - 1)
    width = max(1, min(end - indent, MOST_COLUMNS) - start)
    return [f"    {shown}", f"    {' ' * start}{'^' * width}"]


def _split(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def shown_path(path: Path) -> str:
    """Return the path as a person would write it here."""
    relative = os.path.relpath(path)
    return os.path.normpath(path) if relative.startswith("..") else relative
