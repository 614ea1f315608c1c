"""A file of data as it was when the job looked for it, and the errors of reading it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshwright.config.section import ADDRESS
from meshwright.system.errors import ConfigError, StorageError, first_line
from meshwright.system.retries import ABSENT, read_patiently

T = TypeVar("T")


class ChangedError(OSError):
    """A file isn't the one that it was when the job first looked at it."""


class UnsupportedError(OSError):
    """A file is good, but made in a way that can't be read here."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class DataFile:
    """A file as it was when the job looked for it."""

    path: str
    """Or an address."""
    size: int = -1
    """Bytes; -1: unknown, of a file on the hub."""
    stamp: str = ""
    """Another one, if the content has changed: of a local file, the time of its last change in
    nanoseconds. "": the storage doesn't say."""


def is_address(path: str) -> bool:
    """Return whether it is one of object storage, not a path."""
    return ADDRESS.match(path) is not None


def read_or_say_why(path: str, read: Callable[[], T]) -> T:
    """Return `read()`; call it again after growing waits if its error may pass."""
    try:
        return read_patiently(path, read)
    except (ConfigError, StorageError, ChangedError, *ABSENT):
        raise
    except Exception as error:  # whatever a client of a storage raises
        raise ConfigError("", f"{path} cannot be read: {first_line(error)}") from error
