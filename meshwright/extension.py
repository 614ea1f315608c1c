"""Models, datasets and sinks of a user's own module, by `experimental.custom_import`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.datasets import DATASETS
from meshwright.datasets.sources import DatasetSpec
from meshwright.errors import ConfigError, config_error
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
    """Take over the models and datasets of the module that the config names, if it names one.

    Raises:
        ConfigError: if it cannot be imported, or takes a name that is ours.
    """
    extend_by(config.experimental.custom_import)


def extend_by(name: str, key: str = IMPORT_KEY) -> None:
    """Take over the models and datasets of a user's module.

    Args:
        name: as `experimental.custom_import`; "": none.
        key: that gave it, for errors.

    Raises:
        ConfigError: as `extend`.
    """
    if not name:
        return
    module = _import(name, key)
    _table(module, name, "SINKS", key)  # built later, by the first rank
    for table, known in (("MODELS", MODELS), ("DATASETS", DATASETS)):
        for entry, value in _table(module, name, table, key).items():
            if known.setdefault(entry, value) is not value:
                raise _error(name, f"{table} has {entry!r}, which is there already", key)


def user_sinks(config: JobConfig) -> dict[str, BuildSink]:
    """Return the functions that build the user's sinks, by name."""
    name = config.experimental.custom_import
    return dict(_table(_import(name), name, "SINKS")) if name else {}


def _import(name: str, key: str = IMPORT_KEY) -> ModuleType:
    try:
        return import_user_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        fix = ""
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            fix = 'install it, or name its file: "path/to/file.py"'
        what = f"cannot be imported: {type(error).__name__}: {error}"
        raise _error(name, what, key, fix) from error


def _table(module: ModuleType, name: str, table: str, key: str = IMPORT_KEY) -> Mapping[str, Any]:
    found = getattr(module, table, {})
    kind, is_of_kind = KINDS[table]
    is_table = isinstance(found, Mapping) and all(
        isinstance(entry, str) and is_of_kind(value) for entry, value in found.items()
    )
    if not is_table:
        raise _error(name, f"{table} must be a dict from names to {kind}", key)
    return found


def _error(name: str, what: str, key: str, fix: str = "") -> ConfigError:
    usual = 'write "package.module" or "path/to/file.py"; docs/extending.md has examples'
    return config_error(key, name, what, fix or usual)
