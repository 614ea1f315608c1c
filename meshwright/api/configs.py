"""Loads a config from Python, and reads the metrics of a run. Free of torch."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import read
from meshwright.metrics.report.run import read_run
from meshwright.system.errors import ConfigError, shortened


def load(
    config: str | Path | JobConfig = "", overrides: Mapping[str, object] | None = None
) -> JobConfig:
    """Load a config, check every value, and return it.

    Args:
        config: a TOML, a preset by name, or a config that is loaded already; "": only defaults.
        overrides: new values by dotted key, as `{"training.steps": 5}`. A text stands for the same
            value as on the command line.

    Raises:
        ConfigError: with one entry per mistake, each with its place and a fix.
    """
    _check_arguments(config, overrides)
    values = {tuple(key.split(".")): _plain(value) for key, value in (overrides or {}).items()}
    base = config if isinstance(config, JobConfig) else os.fspath(config)
    return read(Namespace(config=base, overrides=values)).config()


def _check_arguments(config: object, overrides: object) -> None:
    if not isinstance(config, str | os.PathLike | JobConfig):
        what = f"load: config is {shortened(config)}, not a TOML, a preset's name or a config"
        raise ConfigError("", f'{what}\n  fix: write load("my_job.toml"), or load() for defaults')
    keys = overrides if isinstance(overrides, Mapping) else [overrides] if overrides else []
    if not all(isinstance(key, str) for key in keys) or isinstance(overrides, str):
        what = f"load: overrides is {shortened(overrides)}, not a dict with dotted keys"
        raise ConfigError("", f'{what}\n  fix: write {{"training.steps": 5}}')


def _plain(value: object) -> object:
    """Return a value as TOML has it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return list(value) if isinstance(value, tuple) else value


def read_metrics(dump_folder: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl, one for each logged step, in rising order.

    `pandas.DataFrame(read_metrics("outputs"))` is a table. Values that aren't finite are left out.

    Raises:
        ConfigError: if the folder holds no run.
    """
    return [dict(record) for record in read_run(Path(dump_folder)).records]
