"""A torchtitan job as dotted keys, which move one by one to ours."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshwright.errors import ConfigError

Table = dict[str, Any]


class Note(NamedTuple):
    """A note on a key of theirs: its name or meaning here."""

    key: str
    text: str


class Job:
    """Dotted keys of theirs, and the keys of ours that have come of them.

    Attributes:
        given: keys that no rule has taken yet; the keys left at the end mean the same here.
    """

    def __init__(self, given: Table) -> None:
        self.given = given
        self.ours: Table = {}
        self.notes: list[Note] = []
        self.origins: dict[str, str] = {}

    def is_on(self, key: str) -> bool:
        return self.given.get(key) is True

    def number(self, key: str, default: int) -> int:
        """Return a whole number from which other keys follow."""
        value = self.given.get(key, default)
        if type(value) is not int:
            raise ConfigError(key, f"{key} = {value!r}: must be a whole number")
        return value

    def note(self, key: str, text: str) -> None:
        self.notes.append(Note(key, text))

    def put(self, key: str, value: Any, origin: str, text: str) -> None:
        """Give our `key` a value that comes from `origin`, unless `key` is given too."""
        if key != origin:
            if key in self.given:
                self.note(origin, f"without effect: {key} is given too")
                return
            self.origins[key] = origin
        self.ours[key] = value
        self.note(origin, text)


def error_of(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """Return the error of a key of theirs."""
    return ConfigError(key, f"{key} = {value!r} (torchtitan's): {rule}\n  fix: {fix}")


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. A table is entered only if theirs, or `model.args`, has it."""
    for name, value in table.items():
        is_table = not prefix or prefix.startswith("quantize.") or name in ("dataloader", "args")
        if isinstance(value, Mapping) and value and is_table:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(keys: Mapping[str, Any]) -> Table:
    """Return the table of dotted keys."""
    table: Table = {}
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = table
        for part in tables:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return table
