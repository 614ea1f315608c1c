"""A source of documents, as the config names it."""

from dataclasses import dataclass

from meshwright.config.job_config import Source
from meshwright.errors import ConfigError, RecordError, config_error

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
