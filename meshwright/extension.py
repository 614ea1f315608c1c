"""Models, datasets and sinks of a user's own module, by `experimental.custom_import`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.datasets import DATASETS
from meshwright.datasets.sources import DatasetSpec
from meshwright.errors import ConfigError
from meshwright.models.family import Family
from meshwright.specs import MODELS
from meshwright.user_module import import_user_module

IMPORT_KEY = "experimental.custom_import"
KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "MODELS": ("Family", lambda value: isinstance(value, Family)),
    "DATASETS": ("DatasetSpec", lambda value: isinstance(value, DatasetSpec)),
    "SINKS": ("Callable", callable),
}
"""Tables that a module may have, by name; and the kind of their values."""

BuildSink = Callable[[JobConfig, Path], Any]
"""From the config and the dump folder to a sink: `write(record)` and `close()`."""


def extend(config: JobConfig) -> None:
    """Import the user's module, if one is named, and take over its models and datasets.

    Raises:
        ConfigError: if it cannot be imported, or takes a name that is ours.
    """
    if not (name := config.experimental.custom_import):
        return
    module = _import(name)
    _table(module, name, "SINKS")  # built later, by the first rank
    for table, known in (("MODELS", MODELS), ("DATASETS", DATASETS)):
        for key, value in _table(module, name, table).items():
            if known.setdefault(key, value) is not value:
                raise _error(name, f"{table} has {key!r}, which is there already")


def user_sinks(config: JobConfig) -> dict[str, BuildSink]:
    """Return the functions that build the user's sinks, by name."""
    name = config.experimental.custom_import
    return dict(_table(_import(name), name, "SINKS")) if name else {}


def _import(name: str) -> ModuleType:
    try:
        return import_user_module(name)
    except Exception as error:  # importing runs the user's code
        raise _error(name, f"cannot be imported: {type(error).__name__}: {error}") from error


def _table(module: ModuleType, name: str, table: str) -> Mapping[str, Any]:
    found = getattr(module, table, {})
    kind, is_of_kind = KINDS[table]
    is_table = isinstance(found, Mapping) and all(
        isinstance(key, str) and is_of_kind(value) for key, value in found.items()
    )
    if not is_table:
        raise _error(name, f"{table} must be a dict from names to {kind}")
    return found


def _error(name: str, what: str) -> ConfigError:
    fix = 'write "package.module" or "path/to/file.py"; docs/extending.md has examples'
    return ConfigError(IMPORT_KEY, f"{IMPORT_KEY} = {name!r}: {what}\n  fix: {fix}")
