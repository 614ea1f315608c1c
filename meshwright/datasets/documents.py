"""Documents that can be read again and again, in pieces."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.config.training import Source
from meshwright.system.errors import ConfigError, RecordError, config_error

Messages = list[dict[str, str]]


Document = str | Messages
"""A text, or a conversation."""


@dataclass(frozen=True)
class Entry:
    """A source as the config names it."""

    key: str
    """The table that holds its keys: `training`, or `training.datasets.1`."""
    name: str
    """In figures."""
    source: Source

    def error(self, key: str, what: str, fix: str = "") -> ConfigError:
        """That `key` of this source is at fault."""
        return config_error(f"{self.key}.{key}", getattr(self.source, key), what, fix)

    def record_error(self, key: str, what: str) -> RecordError:
        """That a record is at fault, as `key` of this source has it read."""
        error = self.error(key, what)
        return RecordError(error.key, str(error))


class Reader(Protocol):
    """Iterates over documents, and can be begun again where it is."""

    def __iter__(self) -> Iterator[Document]: ...
    def __next__(self) -> Document: ...

    @property
    def state(self) -> Any:
        """Stands, in JSON, for the place before the next document."""


class Documents(Protocol):
    """Documents that can be read again and again, in pieces."""

    max_shards: int
    """Most pieces that can be read independently of each other."""
    parts: int
    """Pieces in which they are best tokenised, by one process each."""

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

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        begin, end = (self._size * s // num_shards for s in (shard, shard + 1))
        return _IndexReader(self._get, begin if state is None else state, end)


class _IndexReader:
    def __init__(self, get: Callable[[int], Document], begin: int, end: int) -> None:
        self._get, self._end, self.state = get, end, begin

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        if self.state >= self._end:
            raise StopIteration
        self.state += 1
        return self._get(self.state - 1)
