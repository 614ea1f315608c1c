"""A config with other values. Free of torch."""

from collections.abc import Mapping
from typing import Any

from meshwright.config.job_config import JobConfig

Update = Mapping[str, Mapping[str, Any]]
"""New values, by section and key."""


def changed(config: JobConfig, update: Update) -> JobConfig:
    """Return `config` with the values of `update`, which are not checked."""
    sections = {
        name: getattr(config, name).model_copy(update=keys) for name, keys in update.items()
    }
    return config.model_copy(update=sections)
