"""A source of documents, as the config names it."""

from dataclasses import dataclass

from meshwright.config.job_config import Source
from meshwright.errors import ConfigError, RecordError

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
        return ConfigError(f"{self.key}.{key}", self._message(key, what, fix))

    def record_error(self, key: str, what: str) -> RecordError:
        """That a record is at fault, as `key` of this source has it read."""
        return RecordError(f"{self.key}.{key}", self._message(key, what))

    def _message(self, key: str, what: str, fix: str = "") -> str:
        value = getattr(self.source, key)
        return f"{self.key}.{key} = {value!r}: {what}" + (f"\n  fix: {fix}" if fix else "")
