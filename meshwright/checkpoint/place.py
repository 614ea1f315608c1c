"""A path and the key it was given by."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, config_error


@dataclass(frozen=True)
class Place:
    """A path that a user gave, and its key: an error names both."""

    key: str
    path: Path

    def check(self, ok: bool, rule: str, fix: str = "") -> None:
        """Raise `ConfigError` unless `ok`."""
        if not ok:
            raise self.error(rule, fix)

    def error(self, rule: str, fix: str = "") -> ConfigError:
        """Return the error of a path that breaks `rule`."""
        return config_error(self.key, str(self.path), rule, fix)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file `name` of the folder."""
        try:
            content = json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.error(f"{name} cannot be read: {reason}") from None
        self.check(isinstance(content, dict), f"{name} holds no JSON object")
        return dict(content)
